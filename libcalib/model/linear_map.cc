// Matrix products of the decoder. On CPUs in fp32 they go to oneDNN instead of the BLAS that at::linear would take: MKL
// restricts itself to AVX2 on AMD processors, where oneDNN's AVX-512 code is more than twice as fast.

#include <optional>
#include <string_view>

#include <ATen/Context.h>
#include <ATen/Functions.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/custom_function.h>

#include "libcalib/model/torch_block.h"

namespace calib::model {
namespace {

using PointwiseLinear = at::Tensor(const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, std::string_view,
                                   c10::List<std::optional<at::Scalar>>, std::optional<std::string_view>);

/// oneDNN's x W^T + b on dense tensors; empty if this libtorch has none.
std::optional<c10::TypedOperatorHandle<PointwiseLinear>> find_onednn_linear() {
  if (!at::hasMKLDNN()) return {};
  const auto schema = c10::Dispatcher::singleton().findSchema({"mkldnn::_linear_pointwise", ""});
  if (!schema || !schema->hasKernelForDispatchKey(c10::DispatchKey::CPU)) return {};
  return schema->typed<PointwiseLinear>();
}

bool takes_onednn(const at::Tensor& x) {
  static const auto op = find_onednn_linear();
  return op && x.device().is_cpu() && x.scalar_type() == at::kFloat && x.numel() > 0;
}

/// weight may be a transposed view.
at::Tensor onednn_linear(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
  static const auto op = find_onednn_linear();
  return op->call(x.contiguous(), weight, bias, "none", c10::List<std::optional<at::Scalar>>(), "");
}

struct DifferentiableLinear : torch::autograd::Function<DifferentiableLinear> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, const at::Tensor& weight,
                            const std::optional<at::Tensor>& bias) {
    context->saved_data["weight"] = weight;
    return onednn_linear(x, weight, bias);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context, torch::autograd::variable_list gradient) {
    const at::Tensor weight = context->saved_data["weight"].toTensor();
    return {onednn_linear(gradient[0], weight.t(), std::nullopt), at::Tensor(), at::Tensor()};
  }
};

}  // namespace

at::Tensor linear_map(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  if (!takes_onednn(x)) return at::linear(x, weight, bias);
  const std::optional<at::Tensor> given = bias.defined() ? std::optional<at::Tensor>(bias) : std::nullopt;
  if (c10::GradMode::is_enabled() && x.requires_grad()) return DifferentiableLinear::apply(x, weight, given);
  return onednn_linear(x, weight, given);
}

}  // namespace calib::model
