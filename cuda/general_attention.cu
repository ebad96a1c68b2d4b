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
// order    that of src/cpu/reference/: the bits are the same. First the largest score; then the sum, a thread adding a
//          block of 64 positions; then the output, a thread adding a dim
// bound    latency; a query head reads all K and V of its group by itself, K three times if that is more than 64 blocks
// PDL      both wait first, then trigger

#include "args_general.h"
#include "common.cuh"
#include "reference.cuh"
#include "rope.cuh"

namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kBlock = 64;
constexpr int kMaxHeadDim = 256;  // at most a thread a dim
constexpr int kHalfWarps = kThreads / kSums;
constexpr int kRun = kBlock / kHalfWarps;  // positions of a block that half a warp scores at once
constexpr int kTile = 64;                  // blocks whose scores are in shared memory
constexpr int kStride = kBlock + 1;        // of those, so that threads that add a block each meet no bank conflict

// scale q . k of the positions of a block, minus infinity outside `first` to `last`, by all threads.
__device__ __forceinline__ void score_block(float (&scores)[kStride], const float* q, const __nv_bfloat16* k,
                                            int head_dim, float scale, int first, int last) {
    const int lane = threadIdx.x % kSums, run = threadIdx.x / kSums * kRun;
    k += run * head_dim;
    float sums[kRun] = {};
#pragma unroll 4
    for (int d = lane; d < head_dim; d += kSums) {
#pragma unroll
        for (int j = 0; j < kRun; ++j) sums[j] = add_product(sums[j], q[d], __bfloat162float(k[j * head_dim + d]));
    }
#pragma unroll
    for (int j = 0; j < kRun; ++j) {
        const float score = half_warp_sum(sums[j]) * scale;
        const int at = run + j;
        if (lane == j) scores[at] = at >= first && at <= last ? score : -INFINITY;
    }
}

// The sum of p[i] v[i] over the positions of a block, v being those of one dim. What was never written may be NaN, and
// has a probability of 0.
__device__ __forceinline__ float weighted_sum(const float (&p)[kStride], const __nv_bfloat16* v) {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kBlock; i += 8) {
        const uint4 eight = *reinterpret_cast<const uint4*>(v + i);
        const uint32_t pairs[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            const float value = j % 2 == 0 ? bf16_low(pairs[j / 2]) : bf16_high(pairs[j / 2]);
            if (p[i + j] != 0) sum = add_product(sum, p[i + j], value);
        }
    }
    return sum;
}

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
    for (uint32_t i = lane % kSums; i < head_dim; i += kSums) {
        const float value = __bfloat162float(x[i]);
        squares = add_product(squares, value, value);
    }
    const float scale = inverse_rms(half_warp_sum(squares), head_dim, args.eps);
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
    __shared__ float tile[kTile][kStride];  // scores, then exp(score - top), then probabilities
    __shared__ float sums[kTile];
    const int thread = threadIdx.x, head = blockIdx.x, row = blockIdx.y;
    const int head_dim = args.head_dim, n_heads = args.n_heads, n_kv_heads = args.n_kv_heads;
    const int kv_head = head / (n_heads / n_kv_heads);
    pdl_wait();
    pdl_launch();

    const int position = args.positions[row];
    const int start = args.window == 0 ? 0 : max(0, position + 1 - int(args.window));
    const int end_block = position / kBlock + 1;
    const uint32_t slot = args.slots == nullptr ? row : args.slots[row];
    const uint32_t* blocks = args.blocks + uint64_t(slot) * args.table_stride;
    const __nv_bfloat16* qkv = static_cast<const __nv_bfloat16*>(args.qkv);
    qkv += (uint64_t(row) * (n_heads + 2 * n_kv_heads) + head) * head_dim;
    for (int d = thread; d < head_dim; d += kThreads) q[d] = __bfloat162float(qkv[d]);

    // Keys of a block, then its values.
    auto keys_of = [&](int index) {
        return static_cast<const __nv_bfloat16*>(args.kv) + blocks[index] * args.block_stride +
               uint64_t(kv_head) * kBlock * head_dim;
    };
    // The scores of n blocks from `first` on.
    auto score = [&](int first, int n) {
        __syncthreads();
        for (int i = 0; i < n; ++i) {
            const int at = (first + i) * kBlock;
            score_block(tile[i], q, keys_of(first + i), head_dim, args.scale, start - at, position - at);
        }
        __syncthreads();
    };
    auto for_each = [&](int n, auto use) {
        for (int i = thread; i < n * kBlock; i += kThreads) use(tile[i / kBlock][i % kBlock]);
    };
    auto blocks_of = [&](int first) { return min(end_block - first, kTile); };

    const int first_block = start / kBlock;
    const bool one_tile = end_block - first_block <= kTile;
    const float sink = args.sinks[head];
    float top = sink;
    for (int first = first_block; first < end_block; first += kTile) {
        score(first, blocks_of(first));
        for_each(blocks_of(first), [&](float score) { top = fmaxf(top, score); });
    }
#pragma unroll
    for (int i = 16; i > 0; i /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, i));
    if (thread % 32 == 0) sums[thread / 32] = top;
    __syncthreads();
    for (int warp = 0; warp < kWarps; ++warp) top = fmaxf(top, sums[warp]);

    auto exponentiate = [&](int first, int n) {
        if (!one_tile) score(first, n);
        for_each(n, [&](float& score) { score = reference_exp(score - top); });
        __syncthreads();
    };
    float sum = 0;
    for (int first = first_block; first < end_block; first += kTile) {
        const int n = blocks_of(first);
        exponentiate(first, n);
        if (thread < n) {
            float block_sum = 0;
            for (int i = 0; i < kBlock; ++i) block_sum += tile[thread][i];
            sums[thread] = block_sum;
        }
        __syncthreads();
        for (int i = 0; i < n; ++i) sum += sums[i];
    }
    sum += reference_exp(sink - top);

    // Thread d has dim d.
    float out = 0;
    for (int first = first_block; first < end_block; first += kTile) {
        const int n = blocks_of(first);
        if (!one_tile) exponentiate(first, n);
        for_each(n, [&](float& p) { p = round_bf16(p / sum); });
        __syncthreads();
        if (thread >= head_dim) continue;
#pragma unroll 2
        for (int i = 0; i < n; ++i) {
            const __nv_bfloat16* v = keys_of(first + i) + uint64_t(n_kv_heads) * kBlock * head_dim + thread * kBlock;
            out += weighted_sum(tile[i], v);
        }
    }
    if (thread < head_dim) {
        __nv_bfloat16* attn = static_cast<__nv_bfloat16*>(args.attn) + (uint64_t(row) * n_heads + head) * head_dim;
        attn[thread] = __float2bfloat16_rn(out);
    }
}
