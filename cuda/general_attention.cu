// general_attention.cu: attention of new tokens, for any head dimension up to 256 and any number of heads. Keys of all
// tokens of a step are written before any is read, so a step may have many tokens of one sequence.
//
//   general_qkv_finish  q = rope(norm(q)) in place; cache[position] = rope(norm(k)), v      each rounded to bf16
//   general_attention   attn = round(sum p[i] v[i]), p[i] = round(exp(s[i] - m) / (sum exp(s[j] - m) + exp(sink - m))),
//                       s[i] = scale q . k[i], m the largest of s and sink
//
// in, out  see args_general.h; kv per block and layer: K [G, 64 positions, head_dim], V [G, head_dim, 64 positions],
// bf16; all else is fp32.
//
// launch   general_qkv_finish: grid (ceil((H + 2 G) / 8), B), a warp a head; general_attention: grid (H, B); block 256
// order    blocks of 64 positions one after the other; a lane has two positions of each, and lanes add at the end
// bound    latency of 64 positions after 64; a query head reads all K and V of its group by itself
// PDL      both wait first, then trigger

#include "args_general.h"
#include "common.cuh"
#include "math.cuh"
#include "rope.cuh"

namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kBlock = 64;
constexpr int kMaxHeadDim = 256;

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads)
    general_qkv_finish(const __grid_constant__ GeneralQkvFinishArgs args) {
    const uint32_t head = blockIdx.x * kWarps + threadIdx.x / 32, lane = threadIdx.x % 32, row = blockIdx.y;
    const uint32_t head_dim = args.head_dim, half = head_dim / 2;
    const uint32_t n_heads = args.n_heads, n_kv_heads = args.n_kv_heads, heads = n_heads + 2 * n_kv_heads;
    pdl_wait();
    pdl_launch();
    if (head >= heads) return;

    __nv_bfloat16* x = static_cast<__nv_bfloat16*>(args.qkv) + (uint64_t(row) * heads + head) * head_dim;
    const uint32_t position = args.positions[row];
    const uint32_t slot = args.slots == nullptr ? row : args.slots[row];
    const uint32_t block = args.blocks[uint64_t(slot) * args.table_stride + position / kBlock];
    __nv_bfloat16* cache = static_cast<__nv_bfloat16*>(args.kv) + block * args.block_stride;
    if (head >= n_heads + n_kv_heads) {
        // V heads follow K heads in the block as they do in qkv, all of one size.
        __nv_bfloat16* to = cache + uint64_t(head - n_heads) * kBlock * head_dim + position % kBlock;
        for (uint32_t i = lane; i < head_dim; i += 32) to[i * kBlock] = x[i];
        return;
    }

    float squares = 0;
    for (uint32_t i = lane; i < head_dim; i += 32) {
        const float value = __bfloat162float(x[i]);
        squares += value * value;
    }
    const float scale = inverse_rms(warp_sum(squares), head_dim, args.eps);
    const bool is_q = head < n_heads;
    const float* weight = is_q ? args.q_norm : args.k_norm;
    __nv_bfloat16* to = is_q ? x : cache + (uint64_t(head - n_heads) * kBlock + position % kBlock) * head_dim;
    for (uint32_t i = lane; i < half; i += 32) {
        float first = round_bf16(weight[i] * (__bfloat162float(x[i]) * scale));
        float second = round_bf16(weight[i + half] * (__bfloat162float(x[i + half]) * scale));
        if (args.inv_freq != nullptr) {
            float cos, sin;
            rope_angle(position, args.inv_freq[i], cos, sin);
            const float unrotated = first;
            first = rotate(first, -second, cos, sin);
            second = rotate(second, unrotated, cos, sin);
        }
        to[i] = __float2bfloat16_rn(first);
        to[i + half] = __float2bfloat16_rn(second);
    }
}

extern "C" __global__ void __launch_bounds__(kThreads)
    general_attention(const __grid_constant__ GeneralAttentionArgs args) {
    __shared__ float q[kMaxHeadDim];
    __shared__ float scores[2][kBlock];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, head = blockIdx.x, row = blockIdx.y;
    const int head_dim = args.head_dim, n_heads = args.n_heads, n_kv_heads = args.n_kv_heads;
    const int kv_head = head / (n_heads / n_kv_heads);
    pdl_wait();
    pdl_launch();

    const int position = args.positions[row];
    const int start = args.window == 0 ? 0 : max(0, position + 1 - int(args.window));
    const uint32_t slot = args.slots == nullptr ? row : args.slots[row];
    const uint32_t* blocks = args.blocks + uint64_t(slot) * args.table_stride;
    const __nv_bfloat16* qkv = static_cast<const __nv_bfloat16*>(args.qkv);
    qkv += (uint64_t(row) * (n_heads + 2 * n_kv_heads) + head) * head_dim;
    for (int d = threadIdx.x; d < head_dim; d += kThreads) q[d] = __bfloat162float(qkv[d]);
    __syncthreads();

    // Keys of a block, then its values.
    auto keys_of = [&](int index) {
        return static_cast<const __nv_bfloat16*>(args.kv) + blocks[index] * args.block_stride +
               uint64_t(kv_head) * kBlock * head_dim;
    };
    // The scores of positions 2 lane and 2 lane + 1 of a block, in every warp; minus infinity where nothing is seen.
    auto score = [&](int index) {
        const __nv_bfloat16* k = keys_of(index);
        float* block_scores = scores[index % 2];
        for (int i = warp; i < kBlock; i += kWarps) {
            const int at = index * kBlock + i;
            float dot = 0;
            if (at >= start && at <= position) {
                for (int d = lane; d < head_dim; d += 32) dot += q[d] * __bfloat162float(k[i * head_dim + d]);
                dot = warp_sum(dot) * args.scale;
            } else {
                dot = -INFINITY;
            }
            if (lane == 0) block_scores[i] = dot;
        }
        // The scores of the block after next overwrite these: by then every warp has passed the next barrier.
        __syncthreads();
        return make_float2(block_scores[2 * lane], block_scores[2 * lane + 1]);
    };

    // The reference divides before it rounds a probability, so the largest score and the sum come first, and the scores
    // are computed twice.
    const int first_block = start / kBlock, last_block = position / kBlock;
    float top = args.sinks[head], sum = 0;
    const float sink = top;
    for (int index = first_block; index <= last_block; ++index) {
        const float2 two = score(index);
        float max = fmaxf(two.x, two.y);
#pragma unroll
        for (int i = 16; i > 0; i /= 2) max = fmaxf(max, __shfl_xor_sync(~0u, max, i));
        max = fmaxf(max, top);
        sum = sum * expf(top - max) + (expf(two.x - max) + expf(two.y - max));
        top = max;
    }
    sum = warp_sum(sum) + expf(sink - top);
    __syncthreads();

    // Each warp has dims warp, warp + 8, ...
    float out[kMaxHeadDim / kWarps] = {};
    for (int index = first_block; index <= last_block; ++index) {
        const float2 two = score(index);
        const float p_first = round_bf16(expf(two.x - top) / sum), p_second = round_bf16(expf(two.y - top) / sum);
        const __nv_bfloat16* v = keys_of(index) + uint64_t(n_kv_heads) * kBlock * head_dim;
#pragma unroll
        for (int j = 0; j < kMaxHeadDim / kWarps; ++j) {
            const int d = warp + kWarps * j;
            if (d >= head_dim) break;
            const __nv_bfloat162 pair = *reinterpret_cast<const __nv_bfloat162*>(v + d * kBlock + 2 * lane);
            // What was never written may be NaN.
            const float v_first = two.x == -INFINITY ? 0.0f : __low2float(pair);
            const float v_second = two.y == -INFINITY ? 0.0f : __high2float(pair);
            out[j] += p_first * v_first + p_second * v_second;
        }
    }

    __nv_bfloat16* attn = static_cast<__nv_bfloat16*>(args.attn) + (uint64_t(row) * n_heads + head) * head_dim;
#pragma unroll
    for (int j = 0; j < kMaxHeadDim / kWarps; ++j) {
        const int d = warp + kWarps * j;
        if (d >= head_dim) break;
        const float value = warp_sum(out[j]);
        if (lane == 0) attn[d] = __float2bfloat16_rn(value);
    }
}
