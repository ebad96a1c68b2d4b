// Which of a row's keys count: the first few as a list in block 0, or the last of those that a count or a share of the
// weights reaches, by bins.
#pragma once

#include "sample_block.cuh"

namespace {

// The largest top_k that is taken from a list.
constexpr uint32_t kTopMost = 64;
// The most keys of a bin that are gathered to find one among them.
constexpr uint32_t kGatherMost = 256;
// Logits between two sums of a bin's 14-bit pieces, which stay below 2^31.
constexpr uint32_t kChunk = 1u << 17;

// Brings the keys for which wanted(key) holds into `list` of block 0. All get their number; kAll if one block has too
// many for the list. `any` is false if the thread has none. The block's threads have met since they gathered last.
template <typename Wanted>
__device__ uint32_t gather(Block& b, const Slice& slice, bool any, const Wanted& wanted) {
    Shared& s = b.s;
    const uint32_t t = threadIdx.x;
    if (t == 0) s.listed = 0;
    __syncthreads();
    if (any) {
        for (uint32_t begin = 0; begin < slice.n; begin += 32 * kThreads) {
            uint32_t which = 0, bit = 1;
            walk(slice.values, begin, min(begin + 32 * kThreads, slice.n), kThreads, t, [&](float logit, uint32_t i) {
                which |= wanted(make_key(logit, slice.first + i)) ? bit : 0;
                bit *= 2;
            });
            for (; which != 0; which &= which - 1) {
                const uint32_t i = begin + (__ffs(which) - 1) * kThreads + t;
                const uint32_t at = atomicAdd(&s.listed, 1);
                if (at < kListEach) s.mine[at] = make_key(slice.values[i], slice.first + i);
            }
        }
    }
    __syncthreads();
    const uint32_t listed = s.listed;
    tell(b, listed, 0, 0, b.rank == 0 ? uint32_t(sizeof(s.gathered)) : 0);
    if (t < kListEach) {
        const Key key = t < listed ? s.mine[t] : 0;
        if constexpr (kClusterBlocks == 1) {
            s.gathered[0][t] = key;
        } else {
            s.box[b.meetings % 2].put(&s.gathered[b.rank][t], key, 0);
        }
    }
    listen(b);
    uint32_t n = 0, mine = 0, most = 0;
    for (uint32_t r = 0; r < kClusterBlocks; ++r) {
        const uint32_t each = b.told()[r * kWarps].word[0];
        if (r < t / kListEach) mine += each;
        n += each;
        most = max(most, each);
    }
    if (most > kListEach) return kAll;
    if (b.rank == 0) {
        const uint32_t i = t % kListEach;
        if (i < b.told()[t / kListEach * kWarps].word[0]) s.list[mine + i] = s.gathered[t / kListEach][i];
        __syncthreads();
    }
    return n;
}

// Calls f(i, place, before) in a lane of some warp for each of the `n` keys in `list`: its place among them, from 0 on,
// and the sum of the `weights` of those in front of it.
template <typename F>
__device__ __forceinline__ void stand(Block& b, uint32_t n, const F& f) {
    Shared& s = b.s;
#pragma unroll 1
    for (uint32_t i = b.warp; i < n; i += kWarps) {
        const Key mine = s.list[i];
        uint32_t place = 0;
        uint64_t before = 0;
#pragma unroll 1
        for (uint32_t j = b.lane; j < n + b.lane; j += 32) {
            const bool ahead = j < n && s.list[j] > mine;
            place += __popc(__ballot_sync(kAll, ahead));
            if (ahead) before += s.weights[j];
        }
        before = warp_add_sums(before);
        if (b.lane == 0) f(i, place, before);
    }
}

// What a selection adds up, and how far.
struct Goal {
    bool counts;  // keys; else their weights
    Weigh weigh;
    uint64_t amount;  // of keys; or the share of the weights' sum, times 2^32

    __device__ __forceinline__ uint64_t measure(float x) const { return counts ? 1 : weigh.scaled(x); }
    __device__ __forceinline__ uint64_t need(uint64_t total) const {
        return counts ? amount : nucleus_need(total, amount);
    }
};

// Sorts the keys from `floor` on into bins, the first ones into bin 0. First by their distance from the largest logit,
// eight bins a unit of the temperature, the last one open; then those of one such bin into as many again; and where
// that leaves many together, by ranges of keys.
struct Bins {
    enum { kCoarse, kFine, kRange } by;
    Key floor;
    uint32_t coarse;
    Key low;
    uint64_t width;
    uint32_t shift;

    // Of a key and its logit's distance, as `Weigh::scale` has it; kBins for a key that is in none.
    __device__ __forceinline__ uint32_t operator()(Key key, float x) const {
        if (by == kRange) return key < low || key - low >= width ? kBins : kBins - 1 - uint32_t((key - low) >> shift);
        const float distance = __fmul_rn(x, -8.0f);
        const uint32_t bin = key < floor ? kBins : uint32_t(fminf(distance, float(kBins - 1)));
        if (by == kCoarse || bin == kBins) return bin;
        const float within = __fmul_rn(__fsub_rn(distance, float(bin)), float(kBins));
        return bin == coarse ? uint32_t(fminf(within, float(kBins - 1))) : kBins;
    }

    // To part bin `bin`; false where all keys have to be parted anew.
    __device__ __forceinline__ bool narrow(uint32_t bin, Key max_key) {
        const auto before = by;
        by = before == kCoarse ? kFine : kRange;
        if (before == kCoarse) {
            coarse = bin;
            return true;
        }
        low = before == kFine ? floor : low + (uint64_t(kBins - 1 - bin) << shift);
        width = before == kFine ? max_key + 1 - floor : 1ull << shift;
        shift = ::max(56 - __clzll(width - 1), 0);
        return before == kRange;
    }
};

// Adds up measures by bin over all blocks, and finds the bin in which the sum, from bin 0 on, reaches the goal, or
// `left` when it is not to be sought again. False if all bins do not reach it. `bin` then has the bin, `bin_need` what
// it has to add, `count[r]` its keys in block r.
__device__ bool find_bin(Block& b, const Slice& slice, const Goal& goal, const Bins& bin_of, bool again,
                         uint64_t left) {
    Shared& s = b.s;
    uint64_t mass = 0;
    uint32_t count = 0;
    const uint32_t t = threadIdx.x;
    for (uint32_t chunk = 0; chunk == 0 || chunk < slice.n; chunk += kChunk) {
        __syncthreads();
        if (t < kBins) s.pieces[0][t] = s.pieces[1][t] = s.pieces[2][t] = s.pieces[3][t] = 0;
        __syncthreads();
        const uint32_t end = min(slice.n - chunk, kChunk) + chunk;
        walk(slice.values, chunk, end, kThreads, t, [&](float logit, uint32_t i) {
            const Key key = make_key(logit, slice.first + i);
            const float x = goal.weigh.scale(logit);
            const uint32_t bin = bin_of(key, x);
            const uint64_t m = bin < kBins ? goal.measure(x) : 0;
            const uint32_t pieces[4] = {uint32_t(m) & 0x3FFF, uint32_t(m >> 14) & 0x3FFF, uint32_t(m >> 28),
                                        bin < kBins};
            // Equal logits fall into one bin: one addition for all of them.
            const uint32_t first = __shfl_sync(kAll, bin, 0);
            if (__all_sync(kAll, bin == first)) {
                if (first == kBins) return;
#pragma unroll
                for (uint32_t p = 0; p < 4; ++p) {
                    const uint32_t sum = __reduce_add_sync(kAll, pieces[p]);
                    if (b.lane == p) atomicAdd(&s.pieces[p][first], sum);
                }
            } else if (bin < kBins) {
#pragma unroll
                for (uint32_t p = 0; p < 4; ++p) {
                    if (pieces[p] != 0) atomicAdd(&s.pieces[p][bin], pieces[p]);
                }
            }
        });
        __syncthreads();
        if (t < kBins) {
            mass += s.pieces[0][t] + (uint64_t(s.pieces[1][t]) << 14) + (uint64_t(s.pieces[2][t]) << 28);
            count += s.pieces[3][t];
        }
    }
    // Nobody reads the last ones any more.
    cluster_sync();
    if (t < kBins) {
        for (uint32_t r = 0; r < kClusterBlocks; ++r) {
            *cluster_peer(&s.mass[b.rank][t], r) = mass;
            *cluster_peer(&s.count[b.rank][t], r) = count;
        }
    }
    cluster_sync();

    uint64_t sum = 0;
    if (t < kBins) {
        for (uint32_t r = 0; r < kClusterBlocks; ++r) sum += s.mass[r][t];
    }
    const uint64_t own = sum;
    sum = running_sum(own, b.lane);
    if (b.lane == 31) s.warps[b.warp] = sum;
    __syncthreads();
    uint64_t total = 0;
    for (uint32_t w = 0; w < kBins / 32; ++w) {
        if (w == b.warp) sum += total;
        total += s.warps[w];
    }
    const uint64_t wanted = again ? goal.need(total) : left;
    if (t < kBins && sum >= wanted && sum - own < wanted) {
        s.bin = t;
        s.bin_need = wanted - (sum - own);
    }
    __syncthreads();
    return total >= wanted;
}

// Which key is the one at which the measures of the keys in the bin just found, from the first key on, reach what they
// have to; 0 where the bin has too many keys to gather them.
__device__ Key find_in_bin(Block& b, const Slice& slice, const Goal& goal, const Bins& bin_of) {
    Shared& s = b.s;
    const uint32_t bin = s.bin;
    uint32_t n = 0, most = 0;
    for (uint32_t r = 0; r < kClusterBlocks; ++r) {
        n += s.count[r][bin];
        most = max(most, s.count[r][bin]);
    }
    if (n > kGatherMost || most > kListEach) return 0;
    gather(b, slice, true, [&](Key key) { return bin_of(key, goal.weigh.scale(key_logit(key))) == bin; });
    if (b.rank == 0) {
        if (threadIdx.x < n) s.weights[threadIdx.x] = goal.measure(goal.weigh.scale(key_logit(s.list[threadIdx.x])));
        __syncthreads();
        stand(b, n, [&](uint32_t i, uint32_t, uint64_t before) {
            if (before < s.bin_need && before + s.weights[i] >= s.bin_need) s.bound = s.list[i];
        });
        __syncthreads();
    }
    tell(b, b.rank == 0 ? s.bound : 0);
    listen(b);
    return told_max(b, 0);
}

// The key at which the measures of the keys from `floor` on, taken from the first, reach the goal; `floor` if they do
// not.
__device__ Key select(Block& b, const Slice& slice, const Goal& goal, Key floor, Key max) {
    Bins bins{Bins::kCoarse, floor, 0, 0, 0, 0};
    bool again = true;
    for (;;) {
        const uint64_t left = b.s.bin_need;
        if (!find_bin(b, slice, goal, bins, again, left)) return floor;
        if (const Key found = find_in_bin(b, slice, goal, bins)) return found;
        again = !bins.narrow(b.s.bin, max);
    }
}

// Gathers the row's `k` first keys, at most kTopMost, and few others in `list` of block 0, and returns how many. Word 0
// of the last meeting is each warp's largest key, and `best` the thread's. kAll if large keys stand so close together
// that too many would come.
__device__ uint32_t gather_top(Block& b, const Slice& slice, Key best, uint32_t k) {
    Shared& s = b.s;
    // The k-th of the warps' largest.
    if (threadIdx.x == 0) s.bound = kFloor + 1;
    __syncthreads();
    // Several lanes share the count of what is larger than one of them.
    constexpr uint32_t kMine = kClusterWarps / kWarps, kShare = 32 / kMine;
    const Key mine = b.told()[b.warp * kMine + b.lane / kShare].word[0];
    uint32_t before = 0;
#pragma unroll 4
    for (uint32_t j = b.lane % kShare; j < kClusterWarps; j += kShare) before += b.told()[j].word[0] > mine;
#pragma unroll
    for (uint32_t offset = 1; offset < kShare; offset *= 2) before += __shfl_xor_sync(kAll, before, offset);
    if (before == k - 1 && mine > kFloor) s.bound = mine;
    __syncthreads();
    const Key bound = s.bound;
    return gather(b, slice, best >= bound, [&](Key key) { return key >= bound; });
}

}  // namespace
