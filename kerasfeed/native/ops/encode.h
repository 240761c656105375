// TensorFlow's tensors <-> the flat bytes of an element, as kerasfeed/spec.py
// lays them out.
#ifndef KERASFEED_NATIVE_OPS_ENCODE_H_
#define KERASFEED_NATIVE_OPS_ENCODE_H_

#include <memory>
#include <string>
#include <vector>

#include "core/element.h"
#include "tensorflow/core/framework/tensor.h"

namespace kerasfeed {

// The element keeps the tensors; only strings are copied. An error in words for
// dtypes that can't travel.
tensorflow::Status EncodeElement(std::vector<tensorflow::Tensor> tensors,
                                 Element* element);

// The tensors of an element whose bytes lie in `block`, which they keep:
// without a copy, but for strings. Checked against the dtypes; an error if the
// bytes don't fit.
tensorflow::Status DecodeElement(const std::vector<Component>& components,
                                 int64_t size, std::shared_ptr<char> block,
                                 const tensorflow::DataTypeVector& types,
                                 std::vector<tensorflow::Tensor>* tensors);

}  // namespace kerasfeed

#endif  // KERASFEED_NATIVE_OPS_ENCODE_H_
