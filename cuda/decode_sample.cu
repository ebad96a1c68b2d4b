// decode_sample.cu: logits to the next token of each row, as the CPU's sampler chooses it, bit for bit.
//
//   l = logits, -inf where masks forbid, + bias; repetition, frequency and presence penalty
//   temperature 0:  the first key;  keys order by (l, -token)
//   otherwise       w = exp((l - max) / temperature) as integers; of the tokens that min_p, top_k and top_p leave, in
//                   ascending order, the first one whose running sum of w exceeds random * sum / 2^64
//
// in   logits [B, logits_stride] f32, rows [B], masks, bias, seen: see args_sample.h
// out  tokens [B] the choice; positions [B] + 1; rows and seen brought up to date; the row's next record in ring.
//      Where no token can be chosen, the record says why and all else stays as it was
//
// how      Each of a row's 8 blocks looks at an eighth of the logits; blocks tell each other of their warps' finds by
//          asynchronous stores, one meeting each. Greedy and top_k up to 64 need the few largest keys: the k-th of all
//          warps' largest ones bounds the k first keys from below, and what reaches it is gathered in block 0, whose
//          warps then count what stands before each. With all tokens, the warps' sums of weights tell which part of the
//          vocabulary has the drawn one; that part is shared among the warps again. Everything else sorts all keys into
//          256 bins by their distance from the largest, those of one bin into 256 again, and gathers what is left.
//          Every sum is one of integers, so that no order matters.
// launch   grid (8, B) as clusters of 8, before sm_90 grid (1, B); block 512. V is at most 2^22. 64 registers and no
//          dynamic shared memory, so that a block starts beside one of the LM head's
// bound    latency; B * V * 4 bytes, from L2
// PDL      reads the row's parameters, which no kernel writes, before it waits; triggers right after

#include "args_sample.h"
#include "cluster.cuh"
#include "common.cuh"
#include "sampling.cuh"

namespace {

constexpr uint32_t kAll = 0xFFFFFFFFu;
constexpr uint32_t kThreads = 512;
constexpr uint32_t kWarps = kThreads / 32;
constexpr uint32_t kClusterBlocks = cluster_blocks(8);
constexpr uint32_t kClusterWarps = kClusterBlocks * kWarps;
// The largest top_k that is taken from a list.
constexpr uint32_t kTopMost = 64;
// The most keys that a block gives to a list.
constexpr uint32_t kListEach = kThreads / kClusterBlocks;
// The most keys of a bin that are gathered to find one among them.
constexpr uint32_t kGatherMost = 256;
constexpr uint32_t kBins = 256;
// Logits between two sums of a bin's 14-bit pieces, which stay below 2^31.
constexpr uint32_t kChunk = 1u << 17;
// Above the keys of all finite logits: that of plus infinity as token 0.
constexpr Key kInfinite = 0xFF800000FFFFFFFFull;
static_assert(kBins % 32 == 0 && kBins <= kThreads && offsetof(SampleRow, flags) % 16 == 0 && sizeof(SampleRow) == 64);

// What a warp tells all blocks.
struct alignas(16) Told {
    uint64_t word[4];
};

struct Shared {
    ClusterBox box[2];
    Told board[2][kClusterWarps];  // by all warps, in this meeting and the last
    alignas(16) SampleRow row;
    SampleRecord* record;
    uint32_t position;
    uint64_t random;
    uint64_t warps[kWarps];
    Key bound;
    Key gathered[kClusterBlocks][kListEach];  // of block 0: keys from all blocks
    union {
        struct {
            Key mine[kListEach];  // this block's share of the list
            Key list[kThreads];
            uint64_t weights[kThreads];
            uint64_t before[kThreads];
            uint32_t place[kThreads];
        };
        // All blocks' sums, when there is no list.
        uint64_t mass[kClusterBlocks][kBins];
    };
    uint32_t count[kClusterBlocks][kBins];
    uint32_t pieces[4][kBins];  // this block's sums
    uint64_t bin_need;
    uint32_t bin;
    uint32_t listed;
    uint32_t token;
};

struct Block {
    Shared& s;
    uint32_t rank;
    uint32_t lane;
    uint32_t warp;
    uint32_t meetings;

    // Of the last meeting.
    __device__ __forceinline__ const Told* told() const { return s.board[(meetings - 1) % 2]; }
};

// Four words on their way to shared memory, past an L1 that may have old ones, and the wait for all that the thread has
// on theirs.
__device__ __forceinline__ void fetch(uint32_t* to, const uint32_t* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(uint32_t(__cvta_generic_to_shared(to))), "l"(from)
                 : "memory");
}
__device__ __forceinline__ void fetch_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }

__device__ __forceinline__ Key larger(Key a, Key b) { return a > b ? a : b; }

__device__ __forceinline__ Key warp_max(Key x) {
    const uint32_t high = __reduce_max_sync(kAll, uint32_t(x >> 32));
    return Key(high) << 32 | __reduce_max_sync(kAll, uint32_t(x >> 32) == high ? uint32_t(x) : 0);
}

__device__ __forceinline__ uint64_t warp_add(uint64_t x) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(kAll, x, offset);
    return x;
}

// Of sums that are below 2^54: up to 2^13 weights of at most 2^40.
__device__ __forceinline__ uint64_t warp_add_sums(uint64_t x) {
    constexpr uint32_t kLow = (1u << 27) - 1;
    return (uint64_t(__reduce_add_sync(kAll, uint32_t(x >> 27))) << 27) + __reduce_add_sync(kAll, uint32_t(x) & kLow);
}

// In which lane the running sum of `x` exceeds `r`, which is below the sum of all; `r` less what stands before it.
__device__ __forceinline__ uint32_t pick(uint32_t lane, uint64_t x, uint64_t& r) {
    uint64_t sum = x;
#pragma unroll
    for (uint32_t offset = 1; offset < 32; offset *= 2) {
        const uint64_t lower = __shfl_up_sync(kAll, sum, offset);
        if (lane >= offset) sum += lower;
    }
    const uint32_t found = __ffs(__ballot_sync(kAll, sum > r)) - 1;
    r -= __shfl_sync(kAll, sum - x, found);
    return found;
}

// One half of a meeting: the warp tells three words to all blocks; `more` bytes come into this block's box beside them.
// What a thread reads of the meeting before the last, it has read.
__device__ void tell(Block& b, uint64_t x, uint64_t y = 0, uint64_t z = 0, uint32_t more = 0) {
    const uint32_t turn = b.meetings % 2;
    Told& told = b.s.board[turn][b.rank * kWarps + b.warp];
    if constexpr (kClusterBlocks == 1) {
        if (b.lane == 0) told = {{x, y, z, 0}};
    } else {
        // Two boxes, because who has all of one meeting may tell of the next while others still wait.
        const ClusterBox& box = b.s.box[turn];
        if (threadIdx.x == 0) b.s.box[turn].expect(uint32_t(sizeof(b.s.board[turn])) + more);
        const bool second = b.lane >= kClusterBlocks;
        if (b.lane < 2 * kClusterBlocks) {
            box.put(&told.word[second ? 2 : 0], second ? z : x, second ? 0 : y, b.lane % kClusterBlocks);
        }
    }
}

// The other half: waits until all warps of all blocks have told.
__device__ __forceinline__ void listen(Block& b) {
    if constexpr (kClusterBlocks == 1) {
        __syncthreads();
    } else {
        b.s.box[b.meetings % 2].wait(b.meetings / 2 % 2);
    }
    ++b.meetings;
}

// Over word `i` of what all warps told.
__device__ __forceinline__ Key told_max(const Block& b, uint32_t i) {
    Key x = 0;
#pragma unroll
    for (uint32_t w = b.lane; w < kClusterWarps; w += 32) x = larger(x, b.told()[w].word[i]);
    return warp_max(x);
}
__device__ __forceinline__ uint64_t told_sum(const Block& b, uint32_t i) {
    uint64_t x = 0;
#pragma unroll
    for (uint32_t w = b.lane; w < kClusterWarps; w += 32) x += b.told()[w].word[i];
    return warp_add(x);
}

// What a block works on: the row's tokens from `first` on.
struct Slice {
    const float* values;
    uint32_t first;
    uint32_t n;
};

// Calls f(logit, i) for every step-th of `values` from `begin` + `offset` on, with several loads in flight. Beyond
// `end` logits are minus infinity; as many calls are made whatever `offset` is.
template <typename F>
__device__ __forceinline__ void walk(const float* values, uint32_t begin, uint32_t end, uint32_t step, uint32_t offset,
                                     const F& f) {
    constexpr uint32_t kFlight = 4;
#pragma unroll 1
    for (uint32_t base = begin; base < end; base += kFlight * step) {
        const float* from = values + base + offset;
        const int left = int(end - base - offset);
        float logits[kFlight];
#pragma unroll
        for (uint32_t j = 0; j < kFlight; ++j) logits[j] = int(j * step) < left ? from[j * step] : -INFINITY;
#pragma unroll
        for (uint32_t j = 0; j < kFlight; ++j) f(logits[j], base + j * step + offset);
    }
}

// The part of `n` things that a warp takes, of whose parts each follows the last one's.
struct Part {
    uint32_t begin;
    uint32_t end;
};
__device__ __forceinline__ Part part_of(uint32_t warp, Part all) {
    const uint32_t each = (all.end - all.begin + kWarps - 1) / kWarps;
    const uint32_t begin = min(all.begin + warp * each, all.end);
    return {begin, min(begin + each, all.end)};
}

// Brings the keys for which wanted(key) holds into `list` of block 0. All get their number; kAll if one block has too
// many for the list. `any` is false if the thread has none.
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
#pragma unroll
    for (uint32_t offset = 1; offset < 32; offset *= 2) {
        const uint64_t lower = __shfl_up_sync(kAll, sum, offset);
        if (b.lane >= offset) sum += lower;
    }
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

// Draws from the `k` first of the `n` keys in `list`; block 0 only.
__device__ uint32_t draw_from_top(Block& b, uint32_t n, uint32_t k, const Weigh& weigh) {
    Shared& s = b.s;
    if (threadIdx.x < n) s.weights[threadIdx.x] = weigh(key_logit(s.list[threadIdx.x]));
    __syncthreads();
    stand(b, n, [&](uint32_t i, uint32_t place, uint64_t before) {
        s.place[i] = place;
        s.before[i] = before;
    });
    __syncthreads();
    // What key `j` adds to a sum over those that top_k leaves. The loops are of one round, and not worth more code.
    const auto among = [&](uint32_t j) { return j < n && s.place[j] < k ? s.weights[j] : 0; };
    uint64_t all = 0;
#pragma unroll 1
    for (uint32_t j = b.lane; j < n; j += 32) all += among(j);
    const uint64_t need = nucleus_need(warp_add_sums(all), s.row.share);
    const auto kept = [&](uint32_t j) { return j < n && s.before[j] < need ? among(j) : 0; };
    uint64_t total = 0;
#pragma unroll 1
    for (uint32_t j = b.lane; j < n; j += 32) total += kept(j);
    const uint64_t r = __umul64hi(s.random, warp_add_sums(total));
#pragma unroll 1
    for (uint32_t i = b.warp; i < n; i += kWarps) {
        const uint32_t token = key_token(s.list[i]);
        uint64_t before = 0;
#pragma unroll 1
        for (uint32_t j = b.lane; j < n; j += 32) {
            if (key_token(s.list[j]) < token) before += kept(j);
        }
        before = warp_add_sums(before);
        if (b.lane == 0 && before <= r && r - before < kept(i)) s.token = token;
    }
    __syncthreads();
    return s.token;
}

// Draws from all keys that the row's parameters leave.
__device__ uint32_t draw_from_all(Block& b, const Slice& slice, Key max, const Weigh& weigh) {
    Shared& s = b.s;
    Key from = kFloor + 1;
#pragma unroll 1
    for (uint32_t pass = 0; pass < 2; ++pass) {
        const bool counts = pass == 0;
        const Goal goal{counts, weigh, counts ? s.row.top_k : s.row.share};
        if (counts ? s.row.top_k != 0 : s.row.share < 1ull << 32) from = select(b, slice, goal, from, max);
    }
    const auto weigh_part = [&](Part part) {
        uint64_t sum = 0;
        walk(slice.values, part.begin, part.end, 32, b.lane, [&](float logit, uint32_t i) {
            if (make_key(logit, slice.first + i) >= from) sum += weigh(logit);
        });
        return sum;
    };
    const Part all{0, slice.n};
    tell(b, warp_add_sums(weigh_part(part_of(b.warp, all))));
    listen(b);
    uint64_t r = __umul64hi(s.random, told_sum(b, 0));
    constexpr uint32_t kEach = (kClusterWarps + 31) / 32;
    uint64_t sum = 0;
#pragma unroll
    for (uint32_t e = 0; e < kEach; ++e) {
        const uint32_t w = kEach * b.lane + e;
        sum += w < kClusterWarps ? b.told()[w].word[0] : 0;
    }
    uint32_t w = kEach * pick(b.lane, sum, r);
    w += pick(b.lane, b.lane < kEach ? b.told()[w + b.lane].word[0] : 0, r);

    uint32_t found = 0;
    if (w / kWarps == b.rank) {
        Part part = part_of(w % kWarps, all);
#pragma unroll 1
        while (part.end - part.begin > 32) {
            const uint64_t mine = warp_add_sums(weigh_part(part_of(b.warp, part)));
            __syncthreads();
            if (b.lane == 0) s.warps[b.warp] = mine;
            __syncthreads();
            part = part_of(pick(b.lane, b.lane < kWarps ? s.warps[b.lane] : 0, r), part);
        }
        const uint64_t mine = weigh_part({part.begin, part.end});
        found = slice.first + part.begin + pick(b.lane, mine, r);
    }
    tell(b, found);
    listen(b);
    return told_max(b, 0);
}

// The largest of a thread's logits, which come in ascending order.
struct Largest {
    float logit = -INFINITY;
    uint32_t i = 0;

    __device__ __forceinline__ void see(float other, uint32_t at) {
        if (other > logit) {
            logit = other;
            i = at;
        }
    }
    __device__ __forceinline__ Key key(const Slice& slice) const {
        return logit > -INFINITY ? make_key(logit, slice.first + i) : 0;
    }
};

// Log-probabilities of `token` and of the most likely ones, under the raw logits, of whose keys `max` is the largest.
__device__ void logprobs(Block& b, const Slice& raw, const float* logits, uint32_t token, Key max,
                         SampleRecord* record) {
    Shared& s = b.s;
    const Key chosen = make_key(logits[token], token);
    const Weigh weigh{key_logit(max), 1.0f, 0};
    uint64_t mass = 0;
    uint32_t before = 0;
    Largest largest;
    walk(raw.values, 0, raw.n, kThreads, threadIdx.x, [&](float logit, uint32_t i) {
        largest.see(logit, i);
        mass += weigh(logit);
        before += make_key(logit, raw.first + i) > chosen;
    });
    const Key best = largest.key(raw);
    tell(b, warp_max(best), warp_add_sums(mass), __reduce_add_sync(kAll, before));
    listen(b);
    // The weights' errors add up to less than 3e-7 of their sum.
    const double log_sum = log(double(told_sum(b, 1)) * 0x1p-40);
    const auto logprob = [&](Key key) { return float(double(key_logit(key)) - double(key_logit(max)) - log_sum); };
    const uint32_t rank = told_sum(b, 2) + 1;

    uint32_t n = 0;
    if (s.row.top_n != 0) {
        n = gather_top(b, raw, best, s.row.top_n);
        if (n == kAll) {
            const Key from = select(b, raw, Goal{true, weigh, s.row.top_n}, kFloor + 1, max);
            n = gather(b, raw, best >= from, [&](Key key) { return key >= from; });
        }
    }
    if (b.rank != 0) return;
    stand(b, n, [&](uint32_t i, uint32_t place, uint64_t) {
        if (place < s.row.top_n) record->top[place] = {key_token(s.list[i]), logprob(s.list[i])};
    });
    if (threadIdx.x == 0) {
        record->value = logprob(chosen);
        record->rank = rank;
        record->n_top = min(n, s.row.top_n);
    }
}

// Repetition, then frequency, then presence penalty, on a token of `seen`.
__device__ __forceinline__ float penalise(float logit, uint32_t seen, const SampleRow& row) {
    if (seen == 0) return logit;
    logit = logit > 0.0f ? __fdiv_rn(logit, row.repetition) : __fmul_rn(logit, row.repetition);
    logit = __fsub_rn(logit, __fmul_rn(row.frequency, __uint2float_rn(seen - 1)));
    return seen > 1 ? __fsub_rn(logit, row.presence) : logit;
}

// A thread's largest keys; where a logit is not below infinity, `raw` is above all keys of those that are, with the
// first such token.
struct Best {
    Key work;
    Key raw;
};

// Loads in flight: all that a thread has of Flint's vocabulary.
constexpr uint32_t kBatch = 37;

// A row whose logits stay as they are.
__device__ __forceinline__ Best look(const Slice& raw) {
    Largest largest;
    uint32_t bad = kAll;
#pragma unroll 1
    for (uint32_t base = threadIdx.x; base < raw.n; base += kBatch * kThreads) {
        const float* from = raw.values + base;
        const uint32_t left = raw.n - base;
        float logits[kBatch];
#pragma unroll
        for (uint32_t j = 0; j < kBatch; ++j) logits[j] = j * kThreads < left ? from[j * kThreads] : -INFINITY;
        bool sound = true;
#pragma unroll
        for (uint32_t j = 0; j < kBatch; ++j) {
            sound &= logits[j] < INFINITY;
            largest.see(logits[j], base + j * kThreads);
        }
        if (!sound && bad == kAll) {
            bad = base;
            while (raw.values[bad] < INFINITY) bad += kThreads;
        }
    }
    const Key key = largest.key(raw);
    return {key, bad == kAll ? key : kInfinite - (raw.first + bad)};
}

// Fills `work` with what the row makes of its raw logits.
__device__ Best change(const SampleRow& row, const DecodeSampleArgs& args, const Slice& raw, float* work) {
    constexpr uint32_t kFlight = 6;
    const uint64_t start = uint64_t(blockIdx.y) * args.vocab + raw.first;
    const uint32_t mask_words = (args.vocab + 31) / 32;
    const bool masked = row.flags & kSampleMasked;
    const bool early = masked && __ldcg(&args.rows[blockIdx.y].output) < row.min_tokens;
    const uint32_t* mask = args.masks + uint64_t(2 * blockIdx.y + early) * mask_words;
    const bool biased = row.flags & kSampleBiased, penalised = row.flags & kSamplePenalised;
    Largest largest, raw_largest;
    uint32_t bad = kAll;
#pragma unroll 1
    for (uint32_t base = threadIdx.x; base < raw.n; base += kFlight * kThreads) {
        const float *from = raw.values + base, *bias_from = args.bias + start + base;
        const uint32_t* seen_from = args.seen + start + base;
        const uint32_t left = raw.n - base;
        float logits[kFlight], bias[kFlight];
        uint32_t seen[kFlight], allowed[kFlight];
#pragma unroll
        for (uint32_t j = 0; j < kFlight; ++j) {
            const uint32_t at = j * kThreads;
            logits[j] = at < left ? from[at] : -INFINITY;
            allowed[j] = at < left && masked ? mask[(raw.first + base + at) / 32] : kAll;
            bias[j] = at < left && biased ? bias_from[at] : 0.0f;
            seen[j] = at < left && penalised ? __ldcg(seen_from + at) : 0;
        }
#pragma unroll
        for (uint32_t j = 0; j < kFlight; ++j) {
            const uint32_t i = base + j * kThreads;
            float logit = logits[j];
            if (!(logit < INFINITY)) bad = min(bad, i);
            raw_largest.see(logit, i);
            if (!(allowed[j] >> (raw.first + i) % 32 & 1)) logit = -INFINITY;
            if (biased) logit = __fadd_rn(logit, bias[j]);
            logit = penalise(logit, seen[j], row);
            largest.see(logit, i);
            if (i < raw.n) work[i] = logit;
        }
    }
    return {largest.key(raw), bad == kAll ? raw_largest.key(raw) : kInfinite - (raw.first + bad)};
}

// What became of the row. Block 0 knows the token, and where log-probabilities are asked for, all do.
struct Choice {
    uint32_t status;
    uint32_t token;
    Key raw_max;
};

// Chooses the row's token. `work` has room for `raw.n`.
__device__ Choice choose(Block& b, const DecodeSampleArgs& args, const Slice& raw, float* work) {
    Shared& s = b.s;
    const bool changed = s.row.flags & (kSampleMasked | kSampleBiased | kSamplePenalised);
    const Best best = changed ? change(s.row, args, raw, work) : look(raw);
    const Slice slice{changed ? work : raw.values, raw.first, raw.n};
    const bool clerk = threadIdx.x == kThreads - 1;
    const uint32_t position = clerk ? __ldcg(&args.positions[blockIdx.y]) : 0;
    tell(b, warp_max(best.work), warp_max(best.raw));
    if (clerk) {
        fetch_wait();
        s.random = random_bits(s.row.seed, s.row.output);
        s.position = position;
        s.record = args.ring + uint64_t(s.row.records % args.ring_lines) * args.ring_rows + blockIdx.y;
    }
    listen(b);
    const Key max = told_max(b, 0), raw_max = told_max(b, 1);
    Choice choice{kSampled, 0, raw_max};
    if (raw_max >= kInfinite - kAll) {
        choice.status = kSampleBadLogit;
        choice.token = key_token(raw_max);
    } else if (raw_max <= kFloor) {
        choice.status = kSampleImpossible;
    } else if (max >= kInfinite - kAll) {
        choice.status = kSampleOverflow;
    } else if (max <= kFloor) {
        choice.status = kSampleNothingLeft;
    } else if (s.row.temperature == 0.0f) {
        choice.token = key_token(max);
    } else {
        const Weigh weigh{key_logit(max), s.row.temperature, s.row.least};
        const uint32_t k = s.row.top_k;
        const uint32_t n = k == 0 || k > kTopMost ? kAll : gather_top(b, slice, best.work, k);
        if (n == kAll) {
            __syncthreads();
            choice.token = draw_from_all(b, slice, max, weigh);
        } else {
            if (b.rank == 0) choice.token = draw_from_top(b, n, k, weigh);
            if (s.row.flags & kSampleLogprobs) {
                tell(b, choice.token);
                listen(b);
                choice.token = told_max(b, 0);
            }
        }
    }
    return choice;
}

}  // namespace

extern "C" __global__ void FLINT_CLUSTER(8) __launch_bounds__(kThreads, 2)
    decode_sample(const __grid_constant__ DecodeSampleArgs args) {
    __shared__ Shared s;
    const uint32_t n_row = blockIdx.y;
    Block b{s, blockIdx.x, threadIdx.x % 32, threadIdx.x / 32, 0};
    SampleRow& row = args.rows[n_row];
    if (threadIdx.x < 2) s.box[threadIdx.x].init();
    // Only its last fields are written by kernels.
    if (threadIdx.x < sizeof(row) / 4) {
        reinterpret_cast<uint32_t*>(&s.row)[threadIdx.x] =
            __ldcg(reinterpret_cast<const uint32_t*>(&row) + threadIdx.x);
    }
    // A block's shared memory can be reached once the block runs.
    __syncthreads();
    cluster_arrive_relaxed();
    cluster_wait();
    pdl_wait();
    pdl_launch();
    if (threadIdx.x == kThreads - 1) fetch(&s.row.flags, &row.flags);
    const uint32_t each = (args.vocab + kClusterBlocks - 1) / kClusterBlocks;
    const uint32_t first = min(b.rank * each, args.vocab);
    const float* logits = args.logits + uint64_t(n_row) * args.logits_stride;
    const Slice raw{logits + first, first, min(each, args.vocab - first)};

    const auto [status, token, raw_max] = choose(b, args, raw, args.workspace + uint64_t(n_row) * args.vocab + first);
    __syncthreads();
    SampleRecord* record = s.record;
    const bool reports = status == kSampled && s.row.flags & kSampleLogprobs;
    if (reports) logprobs(b, raw, logits, token, raw_max, record);
    if (b.rank == 0 && threadIdx.x == 0) {
        record->sequence = s.row.records + 1;
        record->status = status;
        record->token = status == kSampled || status == kSampleBadLogit ? token : 0;
        if (!reports) {
            record->value = status == kSampleBadLogit ? logits[token] : 0.0f;
            record->rank = 0;
            record->n_top = 0;
        }
        row.records = s.row.records + 1;
        if (status == kSampled) {
            args.tokens[n_row] = token;
            args.positions[n_row] = s.position + 1;
            row.output = s.row.output + 1;
            if (s.row.flags & kSamplePenalised) {
                uint32_t* seen = args.seen + uint64_t(n_row) * args.vocab + token;
                *seen = max(__ldcg(seen), 1u) + 1;
            }
        }
    }
}
