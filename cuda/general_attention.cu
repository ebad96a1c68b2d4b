// general_attention.cu: attention of one new token a sequence, for any head dimension up to 256 and any number of
// heads.
//
//   general_qkv_finish  q = rope(norm(q)) in place; cache[position] = rope(norm(k)), v      each rounded to bf16
//   general_attention   attn = sum p[i] v[i] / (sum p[i] + exp(sink - m)), p[i] = exp(scale q . k[i] - m)
//
// in, out  see args_general.h; kv per block and layer: K [G, 64 positions, head_dim], V [G, head_dim, 64 positions],
// bf16 p is rounded to bf16 for the product with v, relative to the maximum so far; all else is fp32.
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
    const uint32_t block = args.blocks[uint64_t(row) * args.table_stride + position / kBlock];
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
    const uint32_t* blocks = args.blocks + uint64_t(row) * args.table_stride;
    const __nv_bfloat16* qkv = static_cast<const __nv_bfloat16*>(args.qkv);
    qkv += (uint64_t(row) * (n_heads + 2 * n_kv_heads) + head) * head_dim;
    for (int d = threadIdx.x; d < head_dim; d += kThreads) q[d] = __bfloat162float(qkv[d]);
    __syncthreads();

    // Each warp has dims warp, warp + 8, ...; each lane positions 2 lane and 2 lane + 1 of every block.
    float out[kMaxHeadDim / kWarps] = {};
    float top = -INFINITY, sum = 0;
    for (int index = start / kBlock; index <= position / kBlock; ++index) {
        const __nv_bfloat16* k = static_cast<const __nv_bfloat16*>(args.kv) + blocks[index] * args.block_stride +
                                 uint64_t(kv_head) * kBlock * head_dim;
        const __nv_bfloat16* v = k + uint64_t(n_kv_heads) * kBlock * head_dim;
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

        const float first = block_scores[2 * lane], second = block_scores[2 * lane + 1];
        float max = fmaxf(first, second);
#pragma unroll
        for (int i = 16; i > 0; i /= 2) max = fmaxf(max, __shfl_xor_sync(~0u, max, i));
        max = fmaxf(max, top);
        const float rescale = expf(top - max);
        top = max;
        const float p_first = expf(first - max), p_second = expf(second - max);
        sum = sum * rescale + (p_first + p_second);
        const float w_first = round_bf16(p_first), w_second = round_bf16(p_second);
#pragma unroll
        for (int j = 0; j < kMaxHeadDim / kWarps; ++j) {
            const int d = warp + kWarps * j;
            if (d >= head_dim) break;
            const __nv_bfloat162 pair = *reinterpret_cast<const __nv_bfloat162*>(v + d * kBlock + 2 * lane);
            // What was never written may be NaN.
            const float v_first = first == -INFINITY ? 0.0f : __low2float(pair);
            const float v_second = second == -INFINITY ? 0.0f : __high2float(pair);
            out[j] = out[j] * rescale + (w_first * v_first + w_second * v_second);
        }
    }

    sum = warp_sum(sum);
    const float sink = args.sinks[head];
    const float share_top = fmaxf(top, sink);
    const float share = expf(top - share_top);
    const float scale = share / (sum * share + expf(sink - share_top));
    __nv_bfloat16* attn = static_cast<__nv_bfloat16*>(args.attn) + (uint64_t(row) * n_heads + head) * head_dim;
#pragma unroll
    for (int j = 0; j < kMaxHeadDim / kWarps; ++j) {
        const int d = warp + kWarps * j;
        if (d >= head_dim) break;
        const float value = warp_sum(out[j]) * scale;
        if (lane == 0) attn[d] = __float2bfloat16_rn(value);
    }
}
