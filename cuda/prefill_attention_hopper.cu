// prefill_attention_hopper.cu: attention of many new tokens over the KV cache, for one layer, on compute
// capability 9.0.
//
//   p[i] = exp(q . k[i] / sqrt(128) - m)         i from max(0, position - window + 1) to position, m the maximum of the
//   attn = sum p[i] v[i] / (sum p[i] + exp(sink - m))         scores so far and the sink
//
// in       q of qkv [T, 10 G, 128] bf16 as prefill_kv leaves it, kv per block and layer K [G, 64 positions, 128] and V
//          [G, 128, 64 positions] bf16, tiles, blocks, sinks: see args_prefill_attention.h
// out      attn [16 G, panel_rows, 64] bf16 in the order of panel.cuh
// p is rounded to bf16 for the product with v, relative to m as it stands then; all else is fp32.
//
// launch   grid min(n_tiles G, SMs), block 384, dynamic shared memory kSharedBytes. Thread blocks take work items off a
//          counter, in the order of the table: an item is a tile and a KV head.
// order    keys come in steps of 128 positions that begin at multiples of 128, in ascending order, and a step that a
//          token does not see leaves its maximum, sum and output as they are to the bit. So a token's result depends
//          on its own position alone: neither on the tile that it is in, nor on its place there, nor on the launch.
// bound    tensor cores: 512 operations a token, query head and position seen
// PDL      waits before the first load, triggers right after it
//
// A work item is 16 tokens x 8 query heads of one KV head: 128 rows, row 8 i + h being head h of token i. Two consumer
// warpgroups have 64 rows each, with q as the A operand in registers; one producer warpgroup copies K and V to shared
// memory, swizzled by 128 bytes, where both lie K-major as the cache has them. A consumer hands the scores of a step
// and the output of the step before to the tensor cores together, so that its softmax runs under the second of them,
// and under whatever the other consumer has there.

#include <cuda_bf16.h>

#include "args_prefill_attention.h"
#include "barrier.cuh"
#include "bulk.cuh"
#include "common.cuh"
#include "fragment.cuh"
#include "panel.cuh"
#include "prefill_tile.cuh"
#include "wgmma.cuh"

#if __CUDA_ARCH_FEAT_SM90_ALL

namespace {

constexpr int kStep = 128;
constexpr int kSlots = 7;
constexpr int kSlotBytes = kStep * kHeadDim * 2;
// Half a slot: K of 64 dims, or V of one block. Rows of 128 bytes, swizzled.
constexpr int kHalfBytes = kSlotBytes / 2;
// Copies that a slot waits for before it is announced, so that several are on their way.
constexpr int kLag = 2;
// Work items known ahead.
constexpr int kItems = 4;
constexpr int kConsumerWarps = 8;
constexpr int kProducerWarps = 4;
constexpr int kProducerThreads = 32 * kProducerWarps;
constexpr uint32_t kNoItem = ~0u;

struct Control {
    uint64_t full[kSlots], empty[kSlots];
    uint64_t item_full[kItems], item_empty[kItems];
    PrefillTile tile[kItems];
    uint32_t kv_head[kItems];  // kNoItem: there is no more work
};
// The slots begin at a multiple of 1,024 bytes.
constexpr int kSharedBytes = kSlots * kSlotBytes + 1024 + sizeof(Control);
static_assert(kSharedBytes <= 232448);

// A place in a ring of n, and how often it came round, modulo 2.
template <int n>
struct Place {
    uint32_t index = 0, phase = 0;
    __device__ __forceinline__ void advance() {
        if (++index == n) {
            index = 0;
            phase ^= 1;
        }
    }
};

// What lane 0 has, which is what all have.
__device__ __forceinline__ uint32_t uniform(uint32_t x) { return __shfl_sync(~0u, x, 0); }
__device__ __forceinline__ PrefillTile uniform(const PrefillTile& tile) {
    return {uniform(tile.row), uniform(tile.rows), uniform(tile.position), uniform(tile.table_row)};
}

__device__ __forceinline__ void copy_16(uint32_t to, const __nv_bfloat16* from) {
    asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

// All but the last `pending` groups are done, one of which had `d`.
template <int pending>
__device__ __forceinline__ void wgmma_wait(float (&d)[64]) {
    ::wgmma_wait<pending>();
#pragma unroll
    for (int i = 0; i < 64; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// d = a b, or d += a b: 128 inputs, of which `slot` describes both halves. A group of its own.
__device__ __forceinline__ void multiply(float (&d)[64], const uint32_t (&a)[8][4], uint64_t slot, bool add) {
#pragma unroll
    for (int i = 0; i < 8; ++i) wgmma<kStep>(d, a[i], slot + (i / 4 * kHalfBytes + i % 4 * 32) / 16, i > 0 || add);
    wgmma_commit();
}

// The steps of 128 positions that the tokens of a tile see.
struct Steps {
    int first, last;
    __device__ __forceinline__ Steps(const PrefillTile& tile, uint32_t window) {
        first = first_visible(tile, window) / kStep;
        last = (tile.position + tile.rows - 1) / kStep;
    }
};

// Copies blocks to slots, announces them kLag slots later.
struct Producer {
    uint32_t slots;  // shared address
    Control* control;
    Place<kSlots> next, announced;
    int unannounced = 0;

    __device__ __forceinline__ uint32_t begin() {
        barrier_wait(shared_address(&control->empty[next.index]), next.phase ^ 1);
        return slots + next.index * kSlotBytes;
    }
    // Every thread for its own copies.
    __device__ __forceinline__ void announce() {
        async_fence();
        barrier_arrive(shared_address(&control->full[announced.index]));
        announced.advance();
        --unannounced;
    }
    __device__ __forceinline__ void end() {
        asm volatile("cp.async.commit_group;" ::: "memory");
        next.advance();
        if (++unannounced > kLag) {
            asm volatile("cp.async.wait_group %0;" ::"n"(kLag) : "memory");
            announce();
        }
    }
    __device__ __forceinline__ void finish() {
        asm volatile("cp.async.wait_group 0;" ::: "memory");
        while (unannounced > 0) announce();
    }
};

// The two blocks of a step. Those that no token of the tile sees are not there.
struct StepBlocks {
    const __nv_bfloat16* part[2];
    bool exists[2];
};

// K of a step: two halves of 64 dims, each [128 positions, 64].
__device__ __forceinline__ void copy_k(Producer& producer, const StepBlocks& blocks, int thread) {
    // A warp copies 2 positions of 256 bytes at a time; the four warps are 8 positions.
    const int position = thread / 16, chunk = thread % 16;
    const uint32_t to = producer.begin() + chunk / 8 * kHalfBytes + position * 128 + (chunk % 8 ^ position % 8) * 16;
#pragma unroll
    for (int b = 0; b < 2; ++b) {
        if (!blocks.exists[b]) continue;
        const __nv_bfloat16* from = blocks.part[b] + 8 * thread;
#pragma unroll
        for (int i = 0; i < 8; ++i) copy_16(to + (8 * b + i) * 8 * 128, from + i * 8 * kHeadDim);
    }
    producer.end();
}

// V of a step: two blocks, each [128 dims, 64 positions]. Positions from `end` on, and blocks that no token sees, are
// zeros: p is zero there, but zero times what was never written may be NaN.
__device__ __forceinline__ void copy_v(Producer& producer, const StepBlocks& blocks, int v_offset, int first, int end,
                                       int thread) {
    // The four warps copy 16 dims of 128 bytes at a time.
    const int dim = thread / 8, chunk = thread % 8;
    const uint32_t to = producer.begin() + dim * 128 + (chunk ^ dim % 8) * 16;
    if (first + kStep <= end && blocks.exists[0]) {
#pragma unroll
        for (int b = 0; b < 2; ++b) {
            const __nv_bfloat16* from = blocks.part[b] + v_offset + 8 * thread;
#pragma unroll
            for (int i = 0; i < 8; ++i) copy_16(to + b * kHalfBytes + i * 16 * 128, from + i * 16 * kBlock);
        }
    } else {
#pragma unroll
        for (int b = 0; b < 2; ++b) {
            const int bytes = 2 * max(0, min(8, end - (first + kBlock * b + 8 * chunk)));
            const __nv_bfloat16* from = blocks.part[b] + v_offset + 8 * thread;
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                copy_16(to + b * kHalfBytes + i * 16 * 128, from + i * 16 * kBlock, blocks.exists[b] ? bytes : 0);
            }
        }
    }
    producer.end();
}

__device__ __forceinline__ void produce(const PrefillAttentionArgs& args, uint32_t slots, Control* control) {
    const int thread = threadIdx.x;
    const uint32_t n_items = args.n_tiles * args.n_kv_heads;
    const int v_offset = args.n_kv_heads * kPartHead;
    Producer producer{slots, control};
    Place<kItems> place, put;

    // Thread 0 asks for work one item ahead.
    auto put_item = [&](uint32_t item) {
        barrier_wait(shared_address(&control->item_empty[put.index]), put.phase ^ 1);
        const bool exists = item < n_items;
        if (exists) control->tile[put.index] = args.tiles[item / args.n_kv_heads];
        control->kv_head[put.index] = exists ? item % args.n_kv_heads : kNoItem;
        barrier_arrive(shared_address(&control->item_full[put.index]));
        put.advance();
    };
    if (thread == 0) put_item(blockIdx.x);

    while (true) {
        barrier_wait(shared_address(&control->item_full[place.index]), place.phase);
        const PrefillTile tile = uniform(control->tile[place.index]);
        const uint32_t kv_head = uniform(control->kv_head[place.index]);
        warp_arrive(shared_address(&control->item_empty[place.index]), threadIdx.x % 32);
        place.advance();
        if (kv_head == kNoItem) break;
        if (thread == 0) {
            const uint32_t taken = atomicAdd(args.counter, 1u);
            // As many are taken as there are items: one for every item but the first of each thread block, and one
            // in vain by each.
            if (taken == n_items - 1) *args.counter = 0;
            put_item(gridDim.x + taken);
        }

        const Steps steps(tile, args.window);
        const int end = tile.position + tile.rows;
        const int first_block = first_visible(tile, args.window) / kBlock, last_block = (end - 1) / kBlock;
        const uint32_t* table = args.blocks + uint64_t(tile.table_row) * args.table_stride;
        const __nv_bfloat16* kv = static_cast<const __nv_bfloat16*>(args.kv) + kv_head * kPartHead;
        auto block_of = [&](int step, int b) { return table[max(first_block, min(last_block, 2 * step + b))]; };
        auto blocks_of = [&](int step, uint32_t block0, uint32_t block1) {
            return StepBlocks{{kv + block0 * args.block_stride, kv + block1 * args.block_stride},
                              {2 * step >= first_block, 2 * step + 1 <= last_block}};
        };

        StepBlocks blocks = blocks_of(steps.first, block_of(steps.first, 0), block_of(steps.first, 1));
        uint32_t block0 = block_of(steps.first + 1, 0), block1 = block_of(steps.first + 1, 1);
        copy_k(producer, blocks, thread);
        for (int step = steps.first; step < steps.last; ++step) {
            const StepBlocks next = blocks_of(step + 1, block0, block1);
            block0 = block_of(step + 2, 0);
            block1 = block_of(step + 2, 1);
            copy_k(producer, next, thread);
            copy_v(producer, blocks, v_offset, step * kStep, end, thread);
            blocks = next;
        }
        copy_v(producer, blocks, v_offset, steps.last * kStep, end, thread);
    }
    producer.finish();
}

__device__ __forceinline__ void consume(const PrefillAttentionArgs& args, uint32_t slots, Control* control) {
    const int group = uniform(threadIdx.x / 128) - 1, warp = uniform(threadIdx.x % 128 / 32), lane = threadIdx.x % 32;
    const int g = lane / 4, t = lane % 4;
    Place<kItems> place;
    Place<kSlots> next;

    auto take = [&]() {
        barrier_wait(shared_address(&control->full[next.index]), next.phase);
        return describe(slots + next.index * kSlotBytes);
    };
    // The slot that `index` was; the warp's products with it are done.
    auto release = [&](uint32_t index) { warp_arrive(shared_address(&control->empty[index]), lane); };

    uint32_t q[8][4];
    float s[64], o[64];
    uint32_t p[8][4];
    auto round_p = [&]() {
#pragma unroll
        for (int i = 0; i < 8; ++i)
#pragma unroll
            for (int j = 0; j < 4; ++j) p[i][j] = pack_bf16(s[8 * i + 2 * j], s[8 * i + 2 * j + 1]);
    };

    while (true) {
        barrier_wait(shared_address(&control->item_full[place.index]), place.phase);
        const PrefillTile tile = uniform(control->tile[place.index]);
        const uint32_t kv_head = uniform(control->kv_head[place.index]);
        warp_arrive(shared_address(&control->item_empty[place.index]), lane);
        place.advance();
        if (kv_head == kNoItem) break;

        const Steps steps(tile, args.window);
        if (8 * group >= tile.rows) {
            for (int i = 0; i < 2 * (steps.last - steps.first + 1); ++i) {
                take();
                release(next.index);
                next.advance();
            }
            continue;
        }

        const TileRows rows(tile, kv_head, 8 * group + 2 * warp, g);
        rows.load_q(args, t, q);
        Softmax softmax(args.sinks[rows.head], t);

        uint64_t k = take();
        wgmma_fence();
        multiply(s, q, k, false);
        wgmma_wait<0>(s);
        release(next.index);
        next.advance();
        rows.mask(s, steps.first * kStep, args.window, t);
        softmax.step(s);
        round_p();
        bool add = false;
        for (int step = steps.first + 1; step <= steps.last; ++step) {
            k = take();
            const uint32_t k_slot = next.index;
            next.advance();
            wgmma_fence();
            multiply(s, q, k, false);
            const uint64_t v = take();
            multiply(o, p, v, add);
            add = true;
            wgmma_wait<1>(s);
            release(k_slot);
            rows.mask(s, step * kStep, args.window, t);
            softmax.step(s);
            // The branch keeps the compiler from waiting for the output before it computes p.
            if (__any_sync(~0u, softmax.rescale[0] != 1 || softmax.rescale[1] != 1)) {
                wgmma_wait<0>(o);
#pragma unroll
                for (int i = 0; i < 64; ++i) o[i] *= softmax.rescale[i / 2 % 2];
            }
            wgmma_wait<0>(o);
            release(next.index);
            next.advance();
            round_p();
        }
        const uint64_t v = take();
        wgmma_fence();
        multiply(o, p, v, add);
        wgmma_wait<0>(o);
        release(next.index);
        next.advance();
        store_attn(args, rows, softmax, o, t);
    }
}

}  // namespace

#endif

extern "C" __global__ void __launch_bounds__(384, 1)
    prefill_attention_hopper(const __grid_constant__ PrefillAttentionArgs args) {
#if __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ uint8_t shared[];
    const uint32_t slots = (shared_address(shared) + 1023) / 1024 * 1024;
    Control* control = reinterpret_cast<Control*>(shared + (slots - shared_address(shared)) + kSlots * kSlotBytes);
    if (threadIdx.x == 0) {
        for (int i = 0; i < kSlots; ++i) {
            barrier_init(shared_address(&control->full[i]), kProducerThreads);
            barrier_init(shared_address(&control->empty[i]), kConsumerWarps * kWarpArrivals);
        }
        for (int i = 0; i < kItems; ++i) {
            barrier_init(shared_address(&control->item_full[i]), 1);
            barrier_init(shared_address(&control->item_empty[i]), (kConsumerWarps + kProducerWarps) * kWarpArrivals);
        }
    }
    __syncthreads();
    pdl_wait();
    pdl_launch();
    if (threadIdx.x < kProducerThreads) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
        produce(args, slots, control);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 224;");
        consume(args, slots, control);
    }
#endif
}
