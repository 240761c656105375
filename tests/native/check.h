// A test framework in a few lines: TEST(name) { ... } registers a test, CHECK
// and CHECK_EQ end the program with what was expected and what came. `main`
// runs the tests whose names hold one of the program's arguments, or all.
#ifndef KERASFEED_TESTS_NATIVE_CHECK_H_
#define KERASFEED_TESTS_NATIVE_CHECK_H_

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <iostream>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

namespace kerasfeed_test {

inline std::vector<std::pair<std::string, std::function<void()>>>& Tests() {
  static auto* tests =
      new std::vector<std::pair<std::string, std::function<void()>>>();
  return *tests;
}

struct Registration {
  Registration(const char* name, std::function<void()> body) {
    Tests().emplace_back(name, std::move(body));
  }
};

[[noreturn]] inline void Fail(const char* file, int line,
                              const std::string& message) {
  std::cerr << file << ":" << line << ": " << message << std::endl;
  std::_Exit(1);
}

inline int RunTests(int argc, char** argv) {
  int run = 0;
  for (const auto& [name, body] : Tests()) {
    bool wanted = argc == 1;
    for (int i = 1; i < argc; ++i)
      wanted = wanted || name.find(argv[i]) != std::string::npos;
    if (!wanted) continue;
    std::cout << name << std::endl;
    body();
    ++run;
  }
  std::cout << run << " passed" << std::endl;
  return run ? 0 : 1;
}

}  // namespace kerasfeed_test

#define TEST(name)                                                           \
  static void Test##name();                                                  \
  static const kerasfeed_test::Registration registration_##name(#name,       \
                                                                Test##name); \
  static void Test##name()

#define CHECK(condition)                                                \
  do {                                                                  \
    if (!(condition))                                                   \
      kerasfeed_test::Fail(__FILE__, __LINE__, "expected " #condition); \
  } while (false)

#define CHECK_EQ(one, other)                                                   \
  do {                                                                         \
    const auto check_one = (one);                                              \
    const auto& check_other = (other);                                         \
    if (!(check_one == check_other)) {                                         \
      std::ostringstream check_text;                                           \
      check_text << "expected " #one " == " #other ". Received: " << check_one \
                 << " and " << check_other;                                    \
      kerasfeed_test::Fail(__FILE__, __LINE__, check_text.str());              \
    }                                                                          \
  } while (false)

#endif  // KERASFEED_TESTS_NATIVE_CHECK_H_
