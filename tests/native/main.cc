#include "check.h"

int main(int argc, char** argv) { return kerasfeed_test::RunTests(argc, argv); }
