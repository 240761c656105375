#include "ops/encode.h"

#include <cstring>
#include <utility>

#include "tensorflow/core/framework/allocation_description.pb.h"
#include "tensorflow/core/framework/types.h"
#include "tensorflow/core/platform/errors.h"
#include "tensorflow/core/platform/tstring.h"

namespace kerasfeed {
namespace {

using tensorflow::DataType;
using tensorflow::Status;
using tensorflow::Tensor;
using tensorflow::TensorShape;
using tensorflow::tstring;

// Memory of a tensor that lies in an element's block. TensorFlow must not write
// into it: others may read it, too.
class BlockBuffer : public tensorflow::TensorBuffer {
 public:
  BlockBuffer(char* data, size_t size, std::shared_ptr<char> block)
      : TensorBuffer(data), size_(size), block_(std::move(block)) {}
  size_t size() const override { return size_; }
  TensorBuffer* root_buffer() override { return this; }
  void FillAllocationDescription(
      tensorflow::AllocationDescription* description) const override {
    description->set_requested_bytes(size_);
    description->set_allocator_name("kerasfeed");
  }
  bool OwnsMemory() const override { return false; }

 private:
  size_t size_;
  std::shared_ptr<char> block_;
};

// Lengths of all strings (8 bytes each, little-endian), then the strings, one
// behind the other.
std::shared_ptr<std::string> EncodeStrings(const Tensor& tensor) {
  const auto values = tensor.flat<tstring>();
  auto data = std::make_shared<std::string>();
  size_t size = 8 * values.size();
  for (int64_t i = 0; i < values.size(); ++i) size += values(i).size();
  data->reserve(size);
  for (int64_t i = 0; i < values.size(); ++i) {
    const uint64_t length = values(i).size();
    data->append(reinterpret_cast<const char*>(&length), sizeof length);
  }
  for (int64_t i = 0; i < values.size(); ++i)
    data->append(values(i).data(), values(i).size());
  return data;
}

Status DecodeStrings(const Component& component, const char* data,
                     Tensor* tensor) {
  auto values = tensor->flat<tstring>();
  const int64_t count = values.size(), head = 8 * count;
  if (component.length < head) {
    return tensorflow::errors::Internal(count, " strings need ", head,
                                        " bytes for their lengths, received ",
                                        component.length);
  }
  int64_t at = head;
  for (int64_t i = 0; i < count; ++i) {
    uint64_t length;
    std::memcpy(&length, data + 8 * i, sizeof length);
    if (length > static_cast<uint64_t>(component.length - at)) {
      return tensorflow::errors::Internal(
          "a string of ", length, " bytes does not fit into the ",
          component.length - at, " that are left");
    }
    values(i).assign(data + at, length);
    at += length;
  }
  if (at != component.length) {
    return tensorflow::errors::Internal(count, " strings need ", at,
                                        " bytes, received ", component.length);
  }
  return Status();
}

struct Owned {
  std::vector<Tensor> tensors;
  std::vector<std::shared_ptr<std::string>> strings;
};

}  // namespace

Status EncodeElement(std::vector<Tensor> tensors, Element* element) {
  auto owned = std::make_shared<Owned>();
  owned->tensors = std::move(tensors);
  int64_t offset = 0, end = 0;
  for (const Tensor& tensor : owned->tensors) {
    Span buffer;
    if (tensor.dtype() == tensorflow::DT_STRING) {
      owned->strings.push_back(EncodeStrings(tensor));
      buffer = {owned->strings.back()->data(),
                static_cast<int64_t>(owned->strings.back()->size())};
    } else if (tensorflow::DataTypeCanUseMemcpy(tensor.dtype())) {
      const auto data = tensor.tensor_data();
      buffer = {data.data(), static_cast<int64_t>(data.size())};
    } else {
      return tensorflow::errors::Unimplemented(
          "a tensor of ", tensorflow::DataTypeString(tensor.dtype()),
          " can't be handed to another process");
    }
    Component component;
    for (int d = 0; d < tensor.dims(); ++d)
      component.shape.push_back(tensor.dim_size(d));
    component.offset = offset;
    component.length = buffer.size;
    end = offset + buffer.size;
    offset = Aligned(end);
    element->components.push_back(std::move(component));
    element->buffers.push_back(buffer);
  }
  element->size = end;
  element->owner = std::move(owned);
  return Status();
}

Status DecodeElement(const std::vector<Component>& components, int64_t size,
                     std::shared_ptr<char> block,
                     const tensorflow::DataTypeVector& types,
                     std::vector<Tensor>* tensors) {
  if (components.size() != types.size()) {
    return tensorflow::errors::Internal("expected ", types.size(),
                                        " component tensors, received ",
                                        components.size());
  }
  for (size_t i = 0; i < components.size(); ++i) {
    const Component& component = components[i];
    TensorShape shape;
    TF_RETURN_IF_ERROR(TensorShape::BuildTensorShape(component.shape, &shape));
    if (component.offset < 0 || component.length < 0 ||
        component.length > size - component.offset) {
      return tensorflow::errors::Internal(
          "a component of ", component.length, " bytes at ", component.offset,
          " does not lie in an element of ", size);
    }
    char* data = block.get() + component.offset;
    if (types[i] == tensorflow::DT_STRING) {
      Tensor tensor(types[i], shape);
      TF_RETURN_IF_ERROR(DecodeStrings(component, data, &tensor));
      tensors->push_back(std::move(tensor));
      continue;
    }
    const int64_t needed =
        shape.num_elements() * tensorflow::DataTypeSize(types[i]);
    if (needed != component.length) {
      return tensorflow::errors::Internal(
          "a tensor of ", shape.DebugString(), " needs ", needed,
          " bytes, received ", component.length);
    }
    if (needed == 0) {
      tensors->emplace_back(types[i], shape);
      continue;
    }
    auto* buffer = new BlockBuffer(data, needed, block);
    tensors->emplace_back(types[i], shape, buffer);
    buffer->Unref();
  }
  return Status();
}

}  // namespace kerasfeed
