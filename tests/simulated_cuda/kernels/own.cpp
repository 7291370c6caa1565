// Operators that only CUDA has, computed on the CPU: attention, cells of recurrent networks, depthwise convolutions,
// dropout. Where they draw numbers, the backward pass draws the same ones again from the seed and offset that were kept.
#include "numbers.h"

#include <ATen/CPUGeneratorImpl.h>

#include <map>

namespace simulated_kernels {

using at::Tensor;
using c10::IValue;
using Values = std::vector<IValue>;

at::Generator RandomState::generator() const {
  uint64_t mixed = seed * 0x9E3779B97F4A7C15u + offset * 0xBF58476D1CE4E5B9u + 1;
  mixed ^= mixed >> 31;
  return at::detail::createCPUGenerator(mixed);
}

namespace {

std::optional<Tensor> maybe(const IValue &value) {
  if (value.isNone() || !value.toTensor().defined()) return std::nullopt;
  return value.toTensor();
}

// ---- dropout ----

Values native_dropout(Values &in, const RandomState &random) {
  Tensor x = in[0].toTensor();
  double p = in[1].toDouble();
  bool train = in[2].isNone() || in[2].toBool();
  if (!train || x.numel() == 0) return {x.clone(), at::ones_like(x, x.options().dtype(at::kBool))};
  Tensor mask = at::empty_like(x, x.options().dtype(at::kBool)).bernoulli_(1 - p, random.generator());
  return {p == 1 ? at::zeros_like(x) : x * mask * (1 / (1 - p)), mask};
}

Values fused_dropout(Values &in, const RandomState &random) {
  Tensor x = in[0].toTensor();
  double keep = in[1].toDouble();
  Tensor mask = at::empty_like(x, x.options().dtype(at::kByte)).bernoulli_(keep, random.generator());
  return {x * mask * (1 / keep), mask};
}

Values masked_scale(Values &in, const RandomState &) { return {in[0].toTensor() * in[1].toTensor() * in[2].toDouble()}; }

// ---- attention ----

struct Attention {
  Tensor probabilities, kept, log_sum; // kept: after dropout
};

Attention attend(const Tensor &q, const Tensor &k, const std::optional<Tensor> &bias, double scale, bool causal, double dropout,
                 const RandomState &random) {
  Tensor scores = at::matmul(q, k.transpose(-2, -1)) * scale;
  if (bias) scores = scores + bias->to(at::kFloat);
  if (causal) {
    Tensor allowed = at::ones({q.size(-2), k.size(-2)}, at::kBool).tril();
    scores = scores.masked_fill(allowed.logical_not(), -std::numeric_limits<float>::infinity());
  }
  Tensor log_sum = at::logsumexp(scores, {-1});
  Tensor probabilities = at::softmax(scores, -1);
  Tensor kept = probabilities;
  if (dropout > 0) {
    Tensor mask = at::empty_like(probabilities).bernoulli_(1 - dropout, random.generator());
    kept = probabilities * mask * (1 / (1 - dropout));
  }
  return {probabilities, kept, log_sum};
}

Tensor wide(const Tensor &x) { return x.to(x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat); }

// Fewer heads of keys than of queries: each is used by several.
Tensor for_all_heads(const Tensor &x, const Tensor &query) {
  return x.size(1) == query.size(1) ? x : x.repeat_interleave(query.size(1) / x.size(1), 1);
}

Tensor for_own_heads(const Tensor &gradient, const Tensor &x) {
  if (gradient.size(1) == x.size(1)) return gradient;
  auto sizes = gradient.sizes().vec();
  sizes[1] = x.size(1);
  sizes.insert(sizes.begin() + 2, gradient.size(1) / x.size(1));
  return gradient.reshape(sizes).sum(2);
}

double scale_of(const IValue &given, const Tensor &query) {
  return given.isNone() ? 1 / std::sqrt(static_cast<double>(query.size(-1))) : given.toDouble();
}

struct Gradients {
  Tensor q, k, v, scores;
};

Gradients attention_backward(const Tensor &grad, const Tensor &query, const Tensor &key, const Tensor &value,
                             const std::optional<Tensor> &bias, double scale, bool causal, double dropout,
                             const RandomState &random) {
  Tensor q = wide(query), k = wide(for_all_heads(key, query)), v = wide(for_all_heads(value, query)), g = wide(grad);
  Attention forward = attend(q, k, bias, scale, causal, dropout, random);
  Tensor grad_v = at::matmul(forward.kept.transpose(-2, -1), g);
  Tensor grad_kept = at::matmul(g, v.transpose(-2, -1));
  Tensor p = forward.probabilities;
  Tensor ratio = dropout > 0 ? at::where(p > 0, forward.kept / p, at::zeros_like(p)) : at::ones_like(p);
  Tensor grad_p = grad_kept * ratio;
  Tensor grad_scores = p * (grad_p - (grad_p * p).sum(-1, true));
  return {at::matmul(grad_scores, k) * scale, for_own_heads(at::matmul(grad_scores.transpose(-2, -1), q) * scale, key),
          for_own_heads(grad_v, value), grad_scores};
}

Tensor number(uint64_t value) { return at::scalar_tensor(static_cast<int64_t>(value), at::kLong); }

// (query, key, value, attn_bias, compute_log_sumexp, dropout_p, is_causal, scale)
Values efficient_attention(Values &in, const RandomState &random) {
  Tensor q = in[0].toTensor();
  auto a = attend(wide(q), wide(for_all_heads(in[1].toTensor(), q)), maybe(in[3]), scale_of(in[7], q), in[6].toBool(), in[5].toDouble(), random);
  Tensor out = at::matmul(a.kept, wide(for_all_heads(in[2].toTensor(), q))).to(q.scalar_type());
  Tensor log_sum;
  if (in[4].toBool()) {
    int64_t rows = (q.size(-2) + 31) / 32 * 32; // padded, as the device's kernel does
    log_sum = at::constant_pad_nd(a.log_sum, {0, rows - q.size(-2)}, std::numeric_limits<float>::infinity());
  } else {
    log_sum = at::empty({q.size(0), q.size(1), 0}, at::kFloat);
  }
  return {out, log_sum, number(random.seed), number(random.offset)};
}

// (grad_out, query, key, value, attn_bias, out, logsumexp, philox_seed, philox_offset, dropout_p, grad_input_mask, is_causal, scale)
Values efficient_attention_backward(Values &in, const RandomState &) {
  if (!in[0].toTensor().defined()) return {Tensor(), Tensor(), Tensor(), Tensor()};
  Tensor q = in[1].toTensor(), k = in[2].toTensor(), v = in[3].toTensor();
  double dropout = in[9].toDouble();
  RandomState random;
  if (dropout > 0)
    random = {static_cast<uint64_t>(in[7].toTensor().item<int64_t>()), static_cast<uint64_t>(in[8].toTensor().item<int64_t>())};
  auto bias = maybe(in[4]);
  Gradients g = attention_backward(in[0].toTensor(), q, k, v, bias, scale_of(in[12], q), in[11].toBool(), dropout, random);
  Tensor grad_bias;
  if (bias && in[10].toBoolList().get(3)) grad_bias = at::sum_to(g.scores, bias->sizes()).to(bias->scalar_type());
  return {g.q.to(q.scalar_type()), g.k.to(k.scalar_type()), g.v.to(v.scalar_type()), grad_bias};
}

// (query, key, value, dropout_p, is_causal, return_debug_mask, scale)
Values flash_attention(Values &in, const RandomState &random) {
  Tensor q = in[0].toTensor(), k = in[1].toTensor(), v = in[2].toTensor();
  auto a = attend(wide(q), wide(for_all_heads(k, q)), std::nullopt, scale_of(in[6], q), in[4].toBool(), in[3].toDouble(), random);
  Tensor out = at::matmul(a.kept, wide(for_all_heads(v, q))).to(q.scalar_type());
  Tensor state = at::stack({number(random.seed), number(random.offset)});
  return {out, a.log_sum, Tensor(), Tensor(), IValue(q.size(-2)), IValue(k.size(-2)), state, number(0), at::empty({0}, q.options())};
}

// (grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, philox_seed,
//  philox_offset, scale)
Values flash_attention_backward(Values &in, const RandomState &) {
  if (!in[0].toTensor().defined()) return {Tensor(), Tensor(), Tensor()};
  Tensor q = in[1].toTensor(), k = in[2].toTensor(), v = in[3].toTensor();
  double dropout = in[10].toDouble();
  RandomState random;
  if (dropout > 0) {
    Tensor state = in[12].toTensor().to(at::kLong);
    random = {static_cast<uint64_t>(state[0].item<int64_t>()), static_cast<uint64_t>(state[1].item<int64_t>())};
  }
  Gradients g = attention_backward(in[0].toTensor(), q, k, v, std::nullopt, scale_of(in[14], q), in[11].toBool(), dropout, random);
  return {g.q.to(q.scalar_type()), g.k.to(k.scalar_type()), g.v.to(v.scalar_type())};
}

// ---- cells of recurrent networks (the fused ones; formulas of torch.nn.LSTMCell and GRUCell) ----

Tensor with_bias(const Tensor &gates, const IValue &bias) {
  auto found = maybe(bias);
  return found ? gates + *found : gates;
}

// (input_gates, hidden_gates, cx, input_bias, hidden_bias) -> hy, cy, workspace of the gates
Values lstm_cell(Values &in, const RandomState &) {
  auto gates = (with_bias(in[0].toTensor(), in[3]) + with_bias(in[1].toTensor(), in[4])).chunk(4, 1);
  Tensor i = gates[0].sigmoid(), f = gates[1].sigmoid(), g = gates[2].tanh(), o = gates[3].sigmoid();
  Tensor cy = f * in[2].toTensor() + i * g;
  return {o * cy.tanh(), cy, at::cat({i, f, g, o}, 1)};
}

// (grad_hy, grad_cy, cx, cy, workspace, has_bias) -> grad_gates, grad_cx, grad_bias
Values lstm_cell_backward(Values &in, const RandomState &) {
  if (!maybe(in[0]) && !maybe(in[1])) return {Tensor(), Tensor(), Tensor()};
  Tensor cx = in[2].toTensor(), cy = in[3].toTensor();
  auto gates = in[4].toTensor().chunk(4, 1);
  Tensor i = gates[0], f = gates[1], g = gates[2], o = gates[3], tanh = cy.tanh();
  Tensor grad_hy = maybe(in[0]).value_or(at::zeros_like(cy)), grad_cy = maybe(in[1]).value_or(at::zeros_like(cy));
  Tensor into_cell = grad_hy * o * (1 - tanh * tanh) + grad_cy;
  Tensor grad = at::cat({into_cell * g * i * (1 - i), into_cell * cx * f * (1 - f), into_cell * i * (1 - g * g),
                         grad_hy * tanh * o * (1 - o)}, 1);
  return {grad, into_cell * f, in[5].toBool() ? grad.sum(0) : Tensor()};
}

// (input_gates, hidden_gates, hx, input_bias, hidden_bias) -> hy, workspace
Values gru_cell(Values &in, const RandomState &) {
  Tensor hx = in[2].toTensor();
  auto from_input = with_bias(in[0].toTensor(), in[3]).chunk(3, 1), from_hidden = with_bias(in[1].toTensor(), in[4]).chunk(3, 1);
  Tensor r = (from_input[0] + from_hidden[0]).sigmoid(), z = (from_input[1] + from_hidden[1]).sigmoid();
  Tensor n = (from_input[2] + r * from_hidden[2]).tanh();
  return {n + z * (hx - n), at::cat({r, z, n, hx, from_hidden[2]}, 1)};
}

// (grad_hy, workspace, has_bias) -> grad_input_gates, grad_hidden_gates, grad_hx, grad_input_bias, grad_hidden_bias
Values gru_cell_backward(Values &in, const RandomState &) {
  Tensor grad = in[0].toTensor();
  auto kept = in[1].toTensor().chunk(5, 1);
  Tensor r = kept[0], z = kept[1], n = kept[2], hx = kept[3], hidden = kept[4];
  Tensor grad_z = grad * (hx - n) * (1 - z) * z, grad_n = grad * (1 - z) * (1 - n * n);
  Tensor grad_r = grad_n * hidden * (1 - r) * r;
  Tensor grad_input = at::cat({grad_r, grad_z, grad_n}, 1), grad_hidden = at::cat({grad_r, grad_z, grad_n * r}, 1);
  bool bias = in[2].toBool();
  return {grad_input, grad_hidden, grad * z, bias ? grad_input.sum(0) : Tensor(), bias ? grad_hidden.sum(0) : Tensor()};
}

// ---- depthwise convolutions: (self, weight, kernel_size, bias, stride, padding, dilation) ----

Values depthwise(Values &in, const RandomState &) {
  Tensor x = in[0].toTensor();
  int64_t dimensions = x.dim() - 2;
  return {at::convolution(x, in[1].toTensor(), maybe(in[3]), in[4].toIntVector(), in[5].toIntVector(), in[6].toIntVector(),
                          false, std::vector<int64_t>(dimensions, 0), x.size(1))};
}

// ---- what the CPU keeps for the backward pass in another form than the device ---------------------------------------

// (self) -> output, buffer: the device leaves the buffer empty
Values log_sigmoid(Values &in, const RandomState &) {
  Tensor x = in[0].toTensor();
  return {at::log_sigmoid(x), at::empty({0}, x.options())};
}

// (grad_output, self, buffer)
Values log_sigmoid_backward(Values &in, const RandomState &) {
  return {in[0].toTensor() * at::sigmoid(-wide(in[1].toTensor()))};
}

// (weight, indices, offsets, scale_grad_by_freq, mode, sparse, per_sample_weights, include_last_offset, padding_idx)
//   -> output, offset2bag, bag_size, maximum_indices: the device fills the middle ones in every mode
Values embedding_bag(Values &in, const RandomState &) {
  Tensor indices = in[1].toTensor(), offsets = in[2].toTensor();
  int64_t mode = in[4].toInt(), padding = in[8].toInt();
  bool last = in[7].toBool();
  auto computed = at::_embedding_bag(in[0].toTensor(), indices, offsets, in[3].toBool(), mode, in[5].toBool(), maybe(in[6]), last, padding);
  Tensor ends = last ? offsets.slice(0, 1) : at::cat({offsets.slice(0, 1), at::full({1}, indices.numel(), offsets.options())});
  Tensor begins = last ? offsets.slice(0, 0, -1) : offsets;
  Tensor bags = at::arange(begins.numel(), offsets.options()).repeat_interleave((ends - begins).to(at::kLong));
  Tensor counted = at::constant_pad_nd(at::cumsum(indices != padding, 0), {1, 0}).to(offsets.scalar_type());
  Tensor bag_size = counted.index_select(0, ends) - counted.index_select(0, begins);
  if (bags.numel() < indices.numel()) bags = at::constant_pad_nd(bags, {0, indices.numel() - bags.numel()});
  Tensor maximum = mode == 2 ? std::get<3>(computed) : at::empty({0}, offsets.options());
  return {std::get<0>(computed), bags, bag_size, maximum};
}

// (input, normalized_shape, weight, eps) -> output, rstd
Values rms_norm(Values &in, const RandomState &) {
  Tensor x = wide(in[0].toTensor());
  std::vector<int64_t> dimensions;
  for (int64_t i = x.dim() - static_cast<int64_t>(in[1].toIntVector().size()); i < x.dim(); ++i) dimensions.push_back(i);
  double eps = in[3].isNone() ? (x.scalar_type() == at::kDouble ? std::numeric_limits<double>::epsilon()
                                                                 : std::numeric_limits<float>::epsilon())
                              : in[3].toDouble();
  Tensor rstd = at::rsqrt((x * x).mean(dimensions, true) + eps), out = x * rstd;
  if (auto weight = maybe(in[2])) out = out * *weight;
  return {out, rstd};
}

// (grad_out, input, normalized_shape, rstd, weight, output_mask) -> grad_input, grad_weight
Values rms_norm_backward(Values &in, const RandomState &) {
  Tensor grad = wide(in[0].toTensor()), x = wide(in[1].toTensor()), rstd = in[3].toTensor(), normed = x * rstd;
  auto weight = maybe(in[4]);
  auto mask = in[5].toBoolList();
  int64_t outer = x.dim() - static_cast<int64_t>(in[2].toIntVector().size());
  std::vector<int64_t> inner_dimensions, outer_dimensions;
  for (int64_t i = 0; i < x.dim(); ++i) (i < outer ? outer_dimensions : inner_dimensions).push_back(i);
  Tensor scaled = weight ? grad * *weight : grad;
  Tensor grad_x = rstd * (scaled - normed * (scaled * normed).mean(inner_dimensions, true));
  Tensor grad_weight;
  if (mask.get(1) && weight) grad_weight = outer ? (grad * normed).sum(outer_dimensions) : grad * normed;
  return {mask.get(0) ? grad_x : Tensor(), grad_weight};
}

} // namespace

const Computation *own_computation(const std::string &name) {
  static const std::map<std::string, Computation> known{
      {"aten::native_dropout", native_dropout},
      {"aten::_fused_dropout", fused_dropout},
      {"aten::_masked_scale", masked_scale},
      {"aten::_scaled_dot_product_efficient_attention", efficient_attention},
      {"aten::_scaled_dot_product_efficient_attention_backward", efficient_attention_backward},
      {"aten::_scaled_dot_product_flash_attention", flash_attention},
      {"aten::_scaled_dot_product_flash_attention_backward", flash_attention_backward},
      {"aten::_thnn_fused_lstm_cell", lstm_cell},
      {"aten::_thnn_fused_lstm_cell_backward_impl", lstm_cell_backward},
      {"aten::_thnn_fused_gru_cell", gru_cell},
      {"aten::_thnn_fused_gru_cell_backward", gru_cell_backward},
      {"aten::_conv_depthwise2d", depthwise},
      {"aten::conv_depthwise3d", depthwise},
      {"aten::log_sigmoid_forward", log_sigmoid},
      {"aten::log_sigmoid_backward", log_sigmoid_backward},
      {"aten::_embedding_bag", embedding_bag},
      {"aten::_embedding_bag_forward_only", embedding_bag},
      {"aten::_fused_rms_norm", rms_norm},
      {"aten::_fused_rms_norm_backward", rms_norm_backward},
  };
  auto found = known.find(name);
  return found == known.end() ? nullptr : &found->second;
}

} // namespace simulated_kernels
