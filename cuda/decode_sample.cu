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
// how      Each of a row's 8 blocks holds an eighth of the logits. Greedy and top_k up to 64 need the few largest keys:
//          of every block's warps, the eight with the largest keys tell them to all blocks, the k-th of these 64 bounds
//          the k first keys from below, and what reaches it is gathered in block 0. Everything else sorts all keys into
//          256 bins by their distance from the largest, those of one bin into 256 again, and gathers what is left.
//          Every sum is one of integers, so that no order matters.
// launch   grid (8, B) as clusters of 8, before sm_90 grid (1, B); block 512. Dynamic shared memory: 4 bytes for each
//          logit of a block, or none with a workspace. V is at most 2^22
// bound    latency; B * V * 4 bytes, from L2
// PDL      waits before reading anything; triggers right after

#include "args_sample.h"
#include "cluster.cuh"
#include "common.cuh"
#include "sampling.cuh"

namespace {

constexpr uint32_t kAll = 0xFFFFFFFFu;
constexpr uint32_t kThreads = 512;
constexpr uint32_t kWarps = kThreads / 32;
constexpr uint32_t kClusterBlocks = cluster_blocks(8);
// The most keys that are taken in order.
constexpr uint32_t kTopMost = 64;
// Keys that a block tells of its warps' largest.
constexpr uint32_t kFirsts = kTopMost / kClusterBlocks < kWarps ? kTopMost / kClusterBlocks : kWarps;
constexpr uint32_t kAllFirsts = kFirsts * kClusterBlocks;
// The most keys of a block that reach the bound, and of all.
constexpr uint32_t kListEach = kThreads / kClusterBlocks;
// The most keys that are put in order to find one among them.
constexpr uint32_t kGatherMost = 256;
constexpr uint32_t kBins = 256;
// Logits between two sums of a bin's 14-bit pieces, which stay below 2^31.
constexpr uint32_t kChunk = 1u << 17;
// Words that a block gives to the others at a time.
constexpr uint32_t kWords = 4;
static_assert(kTopMost <= kThreads && kClusterBlocks * kWords <= kThreads && kBins % 32 == 0 && kBins <= kThreads);

struct Shared {
    SampleRow row;
    uint64_t out[kWords];                       // this block's words
    uint64_t board[2][kClusterBlocks][kWords];  // all blocks' words, of this exchange and of the last
    uint64_t total[kWords];                     // over all blocks
    uint64_t warps[kWarps];
    uint64_t raw_warps[kWarps];
    uint64_t sums[kWarps][kWords];
    Key firsts[kAllFirsts];
    Key bound;
    Key raw_max;
    union {
        // Of block 0: keys from all blocks, one after the other.
        struct {
            Key gathered[kClusterBlocks][kListEach];
            Key list[kThreads];
        };
        // All blocks' sums, when there is no list.
        uint64_t mass[kClusterBlocks][kBins];
    };
    uint32_t count[kClusterBlocks][kBins];
    Key top[kGatherMost];
    uint64_t weights[kGatherMost];
    uint32_t listed;
    uint32_t pieces[4][kBins];  // this block's sums
    uint64_t bin_need;
    uint32_t bin;
    uint32_t bad;
    uint32_t overflow;
    uint32_t token;
    uint32_t status;
};

// What a block works on: the row's tokens from `first` on.
struct Slice {
    const float* values;
    uint32_t first;
    uint32_t n;

    __device__ __forceinline__ Key key(uint32_t i) const { return make_key(values[i], first + i); }
};

struct Block {
    Shared& s;
    uint32_t rank;
    uint32_t lane;
    uint32_t warp;
    uint32_t parity;

    // Of the last exchange.
    __device__ __forceinline__ uint64_t word(uint32_t block, uint32_t i) const { return s.board[parity ^ 1][block][i]; }
};

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

// Of a thread's sums, which are below 2^54: up to 2^13 weights of at most 2^40.
__device__ __forceinline__ uint64_t warp_add_sums(uint64_t x) {
    constexpr uint32_t kLow = (1u << 27) - 1;
    return (uint64_t(__reduce_add_sync(kAll, uint32_t(x >> 27))) << 27) + __reduce_add_sync(kAll, uint32_t(x) & kLow);
}

// Gives every block the words in `out` of every block, and `total` of them all.
template <typename Combine>
__device__ void exchange(Block& b, Combine combine) {
    Shared& s = b.s;
    __syncthreads();
    if (threadIdx.x < kClusterBlocks * kWords) {
        const uint32_t to = threadIdx.x / kWords, i = threadIdx.x % kWords;
        *cluster_peer(&s.board[b.parity][b.rank][i], to) = s.out[i];
    }
    cluster_sync();
    if (threadIdx.x < kWords) {
        uint64_t x = s.board[b.parity][0][threadIdx.x];
        for (uint32_t r = 1; r < kClusterBlocks; ++r) x = combine(x, s.board[b.parity][r][threadIdx.x]);
        s.total[threadIdx.x] = x;
    }
    __syncthreads();
    b.parity ^= 1;
}

__device__ void exchange_sums(Block& b) {
    exchange(b, [](uint64_t x, uint64_t y) { return x + y; });
}

// Adds up words 0 to `n` of the warps' `sums` over all blocks.
__device__ void add_sums(Block& b, uint32_t n) {
    __syncthreads();
    for (uint32_t i = b.warp; i < n; i += kWarps) {
        const uint64_t sum = warp_add(b.lane < kWarps ? b.s.sums[b.lane][i] : 0);
        if (b.lane == 0) b.s.out[i] = sum;
    }
    exchange_sums(b);
}

// Puts the row's largest key into word 0 of `total`, its largest raw one into word 1, and into the others the largest
// of the blocks' `out`; and into `firsts` what the blocks' warps tell of their largest keys. The threads have met since
// they wrote to `out`.
__device__ void publish(Block& b, Key best, Key raw_best) {
    Shared& s = b.s;
    const Key warp_best = warp_max(best), warp_raw = warp_max(raw_best);
    __syncthreads();
    if (b.lane == 0) {
        s.warps[b.warp] = warp_best;
        s.raw_warps[b.warp] = warp_raw;
    }
    __syncthreads();
    const Key other = b.lane < kWarps ? s.warps[b.lane] : 0;
    const bool ahead = other > warp_best || (other == warp_best && b.lane < b.warp);
    const uint32_t before = __popc(__ballot_sync(kAll, ahead));
    if (before < kFirsts && b.lane < kClusterBlocks) {
        *cluster_peer(&s.firsts[b.rank * kFirsts + before], b.lane) = warp_best;
    }
    if (b.warp == 0) {
        const Key max = warp_max(other), raw_max = warp_max(b.lane < kWarps ? s.raw_warps[b.lane] : 0);
        if (b.lane == 0) {
            s.out[0] = max;
            s.out[1] = raw_max;
        }
    }
    exchange(b, larger);
}

// Puts the first `k` of the `n` keys in `list` into `top` in order; with zeros for those that are not there.
__device__ void put_in_order(Block& b, uint32_t n, uint32_t k) {
    Shared& s = b.s;
    for (uint32_t i = threadIdx.x; i < k; i += kThreads) s.top[i] = 0;
    __syncthreads();
    for (uint32_t i = b.warp; i < n; i += kWarps) {
        const Key mine = s.list[i];
        uint32_t before = 0;
        for (uint32_t first = 0; first < n; first += 32) {
            const uint32_t j = first + b.lane;
            before += __popc(__ballot_sync(kAll, j < n && s.list[j] > mine));
        }
        if (b.lane == 0 && before < k) s.top[before] = mine;
    }
    __syncthreads();
}

// Where the `n`-th of all blocks' gathered keys stands, if block r has `each(r)` of them.
template <typename Each>
__device__ __forceinline__ Key gathered(Block& b, uint32_t n, const Each& each) {
    for (uint32_t r = 0; r < kClusterBlocks; ++r) {
        if (n < each(r)) return b.s.gathered[r][n];
        n -= each(r);
    }
    return 0;
}

// What a selection adds up, and how far.
struct Goal {
    bool counts;  // keys; else their weights
    Weigh weigh;
    uint64_t amount;  // of keys; or the share of the weights' sum, times 2^32

    __device__ __forceinline__ uint64_t measure(Key key) const { return counts ? 1 : weigh(key); }
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
    float max;
    float temperature;
    uint32_t coarse;
    Key low;
    uint64_t width;
    uint32_t shift;

    // kBins for a key that is in none.
    __device__ __forceinline__ uint32_t operator()(Key key) const {
        if (by == kRange) return key < low || key - low >= width ? kBins : kBins - 1 - uint32_t((key - low) >> shift);
        const float distance = __fmul_rn(__fdiv_rn(__fsub_rn(max, key_logit(key)), temperature), 8.0f);
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
#pragma unroll 1
        for (uint32_t base = chunk; base < end; base += kThreads) {
            const uint32_t i = base + t;
            const Key key = i < end ? slice.key(i) : 0;
            const uint32_t bin = i < end ? bin_of(key) : kBins;
            const uint64_t m = bin < kBins ? goal.measure(key) : 0;
            const uint32_t pieces[4] = {uint32_t(m) & 0x3FFF, uint32_t(m >> 14) & 0x3FFF, uint32_t(m >> 28),
                                        bin < kBins};
            // Equal logits fall into one bin: one addition for all of them.
            const uint32_t first = __shfl_sync(kAll, bin, 0);
            if (__all_sync(kAll, bin == first)) {
                if (first == kBins) continue;
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
        }
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
// have to. False where the bin has too many keys to put them in order. The key is in `bound` of every block.
__device__ bool find_in_bin(Block& b, const Slice& slice, const Goal& goal, const Bins& bin_of) {
    Shared& s = b.s;
    uint32_t n = 0, most = 0;
    for (uint32_t r = 0; r < kClusterBlocks; ++r) {
        n += s.count[r][s.bin];
        most = max(most, s.count[r][s.bin]);
    }
    if (n > kGatherMost || most > kListEach) return false;
    if (threadIdx.x == 0) s.listed = 0;
    __syncthreads();
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < slice.n; i += kThreads) {
        const Key key = slice.key(i);
        if (bin_of(key) == s.bin) cluster_peer(s.gathered[b.rank], 0)[atomicAdd(&s.listed, 1)] = key;
    }
    cluster_sync();
    if (b.rank == 0) {
        if (threadIdx.x < n)
            s.list[threadIdx.x] = gathered(b, threadIdx.x, [&](uint32_t r) { return s.count[r][s.bin]; });
        __syncthreads();
        put_in_order(b, n, n);
        const uint64_t m = threadIdx.x < n ? goal.measure(s.top[threadIdx.x]) : 0;
        if (threadIdx.x < n) s.weights[threadIdx.x] = m;
        __syncthreads();
        if (threadIdx.x < n) {
            uint64_t before = 0;
            for (uint32_t i = 0; i < threadIdx.x; ++i) before += s.weights[i];
            if (before < s.bin_need && before + m >= s.bin_need) {
                for (uint32_t r = 0; r < kClusterBlocks; ++r) *cluster_peer(&s.bound, r) = s.top[threadIdx.x];
            }
        }
    }
    cluster_sync();
    return true;
}

// The key at which the measures of the keys from `floor` on, taken from the first, reach the goal; `floor` if they do
// not.
__device__ Key select(Block& b, const Slice& slice, const Goal& goal, Key floor, Key max) {
    Bins bins{Bins::kCoarse, floor, key_logit(max), b.s.row.temperature, 0, 0, 0, 0};
    bool again = true;
    for (;;) {
        const uint64_t left = b.s.bin_need;
        if (!find_bin(b, slice, goal, bins, again, left)) return floor;
        if (find_in_bin(b, slice, goal, bins)) return b.s.bound;
        again = !bins.narrow(b.s.bin, max);
    }
}

// Gathers the keys from `from` on in `list` of block 0, which gets their number, others 0; kAll where a block has too
// many for it. `best` is the thread's largest.
__device__ uint32_t gather(Block& b, const Slice& slice, Key best, Key from) {
    Shared& s = b.s;
    if (threadIdx.x == 0) s.listed = 0;
    __syncthreads();
    if (best >= from) {
        for (uint32_t i = threadIdx.x; i < slice.n; i += kThreads) {
            const Key key = slice.key(i);
            if (key < from) continue;
            const uint32_t at = atomicAdd(&s.listed, 1);
            if (at < kListEach) cluster_peer(s.gathered[b.rank], 0)[at] = key;
        }
    }
    __syncthreads();
    if (threadIdx.x == 0) s.out[0] = s.listed;
    exchange(b, larger);
    if (s.total[0] > kListEach) return kAll;
    if (b.rank != 0) return 0;
    uint32_t n = 0;
    for (uint32_t r = 0; r < kClusterBlocks; ++r) n += b.word(r, 0);
    if (threadIdx.x < n) {
        s.list[threadIdx.x] = gathered(b, threadIdx.x, [&](uint32_t r) { return uint32_t(b.word(r, 0)); });
    }
    __syncthreads();
    return n;
}

// A key that the `k` first keys reach, at most kTopMost, and few others, as `publish` told `firsts` of them.
__device__ Key bound_top(Block& b, uint32_t k) {
    Shared& s = b.s;
    if (threadIdx.x == 0) s.bound = kFloor + 1;
    __syncthreads();
    for (uint32_t i = b.warp; i < kAllFirsts; i += kWarps) {
        const Key mine = s.firsts[i];
        uint32_t before = 0;
#pragma unroll
        for (uint32_t first = 0; first < kAllFirsts; first += 32) {
            const uint32_t j = first + b.lane;
            const Key other = j < kAllFirsts ? s.firsts[j] : 0;
            before += __popc(__ballot_sync(kAll, other > mine || (other == mine && j < i)));
        }
        if (b.lane == 0 && before == k - 1 && mine > kFloor) s.bound = mine;
    }
    __syncthreads();
    return s.bound;
}

// Draws from the `n` keys in `top`; block 0 only. Leaves the token in `token`.
__device__ void draw_from_top(Block& b, uint32_t n) {
    Shared& s = b.s;
    if (b.warp == 0) {
        static_assert(kTopMost == 64);
        const Weigh weigh{key_logit(s.top[0]), s.row.temperature, s.row.least};
        // Two keys a lane, in order. Those with a weight stand first: weights do not rise along the keys.
        Key key[2];
        uint64_t w[2], before[2], all = 0;
#pragma unroll
        for (uint32_t h = 0; h < 2; ++h) {
            const uint32_t i = 32 * h + b.lane;
            key[h] = i < n ? s.top[i] : 0;
            w[h] = i < n ? weigh(key[h]) : 0;
            uint64_t sum = w[h];
#pragma unroll
            for (uint32_t offset = 1; offset < 32; offset *= 2) {
                const uint64_t lower = __shfl_up_sync(kAll, sum, offset);
                if (b.lane >= offset) sum += lower;
            }
            before[h] = all + sum - w[h];
            all += __shfl_sync(kAll, sum, 31);
        }
        const uint64_t need = nucleus_need(all, s.row.share);
        uint32_t kept = 0;
#pragma unroll
        for (uint32_t h = 0; h < 2; ++h) {
            if (before[h] >= need) w[h] = 0;
            s.weights[32 * h + b.lane] = w[h];
            kept += __popc(__ballot_sync(kAll, w[h] != 0));
        }
        const uint64_t random = random_bits(s.row.seed, s.row.output);
        const uint64_t r = __umul64hi(random, warp_add_sums(w[0] + w[1]));
        __syncwarp();
        uint64_t sum[2] = {};
#pragma unroll 4
        for (uint32_t i = 0; i < kept; ++i) {
            const uint32_t token = key_token(s.top[i]);
            const uint64_t weight = s.weights[i];
#pragma unroll
            for (uint32_t h = 0; h < 2; ++h) sum[h] += token < key_token(key[h]) ? weight : 0;
        }
#pragma unroll
        for (uint32_t h = 0; h < 2; ++h) {
            if (sum[h] <= r && r - sum[h] < w[h]) s.token = key_token(key[h]);
        }
    }
    __syncthreads();
}

// The part of a slice that a warp walks through in order.
struct Stretch {
    uint32_t begin;
    uint32_t end;
};

__device__ __forceinline__ Stretch stretch(const Block& b, const Slice& slice) {
    const uint32_t each = (slice.n + kWarps - 1) / kWarps;
    const uint32_t begin = min(b.warp * each, slice.n);
    return {begin, min(begin + each, slice.n)};
}

// The sum of weights of the row's keys that reach `from`. Leaves those of the warps' stretches in `warps`, and each
// block's in word 0.
__device__ uint64_t weigh_all(Block& b, const Slice& slice, const Weigh& weigh, Key from) {
    Shared& s = b.s;
    const Stretch part = stretch(b, slice);
    uint64_t sum = 0;
    for (uint32_t i = part.begin + b.lane; i < part.end; i += 32) {
        const Key key = slice.key(i);
        if (key >= from) sum += weigh(key);
    }
    sum = warp_add_sums(sum);
    if (b.lane == 0) s.sums[b.warp][0] = s.warps[b.warp] = sum;
    add_sums(b, 1);
    return s.total[0];
}

// Draws from all keys that the row's parameters leave. The token is in `token` of block 0.
__device__ void draw_from_all(Block& b, const Slice& slice, Key max) {
    Shared& s = b.s;
    const Weigh weigh{key_logit(max), s.row.temperature, s.row.least};
    Key from = kFloor + 1;
#pragma unroll 1
    for (uint32_t pass = 0; pass < 2; ++pass) {
        const bool counts = pass == 0;
        const Goal goal{counts, weigh, counts ? s.row.top_k : s.row.share};
        if (counts ? s.row.top_k != 0 : s.row.share < 1ull << 32) from = select(b, slice, goal, from, max);
    }
    const uint64_t total = weigh_all(b, slice, weigh, from);

    uint64_t r = __umul64hi(random_bits(s.row.seed, s.row.output), total), before = 0;
    for (uint32_t i = 0; i < b.rank; ++i) before += b.word(i, 0);
    if (r >= before && r - before < b.word(b.rank, 0)) {
        for (uint32_t i = 0; i < b.warp; ++i) before += s.warps[i];
        if (r >= before && r - before < s.warps[b.warp]) {
            r -= before;
            const Stretch part = stretch(b, slice);
            for (uint32_t base = part.begin; base < part.end; base += 32) {
                const uint32_t i = base + b.lane;
                const Key key = i < part.end ? slice.key(i) : 0;
                uint64_t sum = key >= from ? weigh(key) : 0;
#pragma unroll
                for (int offset = 1; offset < 32; offset *= 2) {
                    const uint64_t lower = __shfl_up_sync(kAll, sum, offset);
                    if (b.lane >= offset) sum += lower;
                }
                const uint32_t beyond = __ballot_sync(kAll, sum > r);
                if (beyond != 0) {
                    if (b.lane == __ffs(beyond) - 1) *cluster_peer(&s.token, 0) = key_token(key);
                    break;
                }
                r -= __shfl_sync(kAll, sum, 31);
            }
        }
    }
    cluster_sync();
}

// Log-probabilities of `token` of block 0, and of the most likely ones, under the raw logits.
__device__ void logprobs(Block& b, const Slice& raw, const float* logits, SampleRecord* record) {
    Shared& s = b.s;
    if (threadIdx.x == 0) s.out[0] = b.rank == 0 ? s.token : 0;
    exchange_sums(b);
    const uint32_t token = s.total[0];
    const Key max = s.raw_max;
    const Key chosen = make_key(logits[token], token);

    const Weigh weigh{key_logit(max), 1.0f, 0};
    uint64_t mass = 0;
    uint32_t before = 0;
    Key best = 0;
    for (uint32_t i = threadIdx.x; i < raw.n; i += kThreads) {
        const Key key = raw.key(i);
        mass += weigh(key);
        before += key > chosen;
        best = larger(best, key);
    }
    mass = warp_add_sums(mass);
    before = __reduce_add_sync(kAll, before);
    if (b.lane == 0) {
        s.sums[b.warp][0] = mass;
        s.sums[b.warp][1] = before;
    }
    add_sums(b, 2);
    // The weights' errors add up to less than 3e-7 of their sum.
    const double log_sum = log(double(s.total[0]) * 0x1p-40);
    const auto logprob = [&](Key key) { return float(double(key_logit(key)) - double(key_logit(max)) - log_sum); };
    const uint32_t rank = s.total[1] + 1;

    uint32_t n = 0;
    if (s.row.top_n != 0) {
        publish(b, best, 0);
        for (Key from = bound_top(b, s.row.top_n); (n = gather(b, raw, best, from)) == kAll;) {
            // Large keys stood together, so that a few warps had many.
            from = select(b, raw, Goal{true, weigh, s.row.top_n}, kFloor + 1, max);
        }
        if (b.rank == 0) put_in_order(b, n, s.row.top_n);
        n = min(n, s.row.top_n);
    }
    if (b.rank != 0) return;
    if (threadIdx.x < n) record->top[threadIdx.x] = {key_token(s.top[threadIdx.x]), logprob(s.top[threadIdx.x])};
    if (threadIdx.x == 0) {
        record->value = logprob(chosen);
        record->rank = rank;
        record->n_top = n;
    }
}

// Repetition, then frequency, then presence penalty, on a token of `seen`.
__device__ __forceinline__ float penalise(float logit, uint32_t seen, const SampleRow& row) {
    if (seen == 0) return logit;
    logit = logit > 0.0f ? __fdiv_rn(logit, row.repetition) : __fmul_rn(logit, row.repetition);
    logit = __fsub_rn(logit, __fmul_rn(row.frequency, __uint2float_rn(seen - 1)));
    return seen > 1 ? __fsub_rn(logit, row.presence) : logit;
}

// A thread's largest keys.
struct Best {
    Key work;
    Key raw;
};

// A thread's loads in flight: all that it has of Flint's vocabulary.
struct Batch {
    static constexpr uint32_t kSize = 37;
    float logits[kSize];

    // From the thread's `base` on.
    __device__ __forceinline__ void load(const Slice& raw, uint32_t base) {
#pragma unroll
        for (uint32_t j = 0; j < kSize; ++j) {
            const uint32_t i = base + j * kThreads;
            logits[j] = i < raw.n ? __ldcg(raw.values + i) : -INFINITY;
        }
    }
};

// Fills `work`, which has room for `raw.n`, with what the row makes of its raw logits, the first of which are in
// `batch`.
template <bool kPlain>
__device__ Best fill(Shared& s, const DecodeSampleArgs& args, const Slice& raw, Batch& batch, float* work) {
    constexpr float kInfinity = __builtin_huge_valf();
    constexpr uint32_t kBatch = Batch::kSize;
    const SampleRow row = s.row;
    const uint64_t start = uint64_t(blockIdx.y) * args.vocab;
    const uint32_t mask_words = (args.vocab + 31) / 32;
    const uint32_t* mask = args.masks + uint64_t(2 * blockIdx.y + (row.output < row.min_tokens)) * mask_words;
    float best = -kInfinity, raw_best = -kInfinity;
    uint32_t best_token = 0, raw_best_token = 0, bad = kAll;
    bool overflow = false;
    for (uint32_t base = threadIdx.x; base < raw.n; base += kBatch * kThreads) {
        if (base != threadIdx.x) batch.load(raw, base);
#pragma unroll
        for (uint32_t j = 0; j < kBatch; ++j) {
            const uint32_t i = base + j * kThreads, token = raw.first + i;
            if (i >= raw.n) break;
            float logit = batch.logits[j];
            if (!(logit < kInfinity)) bad = min(bad, token);
            if (!kPlain) {
                if (logit > raw_best) {
                    raw_best = logit;
                    raw_best_token = token;
                }
                if (row.flags & kSampleMasked && !(mask[token / 32] >> token % 32 & 1)) logit = -kInfinity;
                if (row.flags & kSampleBiased) logit = __fadd_rn(logit, args.bias[start + token]);
                if (row.flags & kSamplePenalised) logit = penalise(logit, args.seen[start + token], row);
                overflow |= logit == kInfinity;
            }
            if (logit > best) {
                best = logit;
                best_token = token;
            }
            work[i] = logit;
        }
    }
    if (bad != kAll) atomicMin(&s.bad, bad);
    if (overflow) atomicOr(&s.overflow, 1);
    const Key key = best > -kInfinity ? make_key(best, best_token) : 0;
    if (kPlain) return {key, key};
    return {key, raw_best > -kInfinity ? make_key(raw_best, raw_best_token) : 0};
}

// Chooses the row's token: the status, and with kSampled the token in `token` of block 0.
__device__ uint32_t choose(Block& b, const DecodeSampleArgs& args, const Slice& raw, Batch& batch, float* work) {
    Shared& s = b.s;
    constexpr uint32_t kChanged = kSampleMasked | kSampleBiased | kSamplePenalised;
    const Best best =
        s.row.flags & kChanged ? fill<false>(s, args, raw, batch, work) : fill<true>(s, args, raw, batch, work);
    __syncthreads();
    if (threadIdx.x == 0) {
        s.out[2] = s.bad == kAll ? 0 : ~s.bad;
        s.out[3] = s.overflow;
    }
    publish(b, best.work, best.raw);
    const Key max = s.total[0];
    const Key raw_max = s.total[1];
    if (threadIdx.x == 0) s.raw_max = raw_max;
    if (s.total[2] != 0) {
        if (threadIdx.x == 0) s.token = ~uint32_t(s.total[2]);
        return kSampleBadLogit;
    }
    if (raw_max <= kFloor) return kSampleImpossible;
    if (s.total[3] != 0) return kSampleOverflow;
    if (max <= kFloor) return kSampleNothingLeft;

    const Slice slice{work, raw.first, raw.n};
    if (s.row.temperature == 0.0f) {
        if (threadIdx.x == 0) s.token = key_token(max);
        return kSampled;
    }
    const uint32_t k = s.row.top_k;
    const uint32_t n = k == 0 || k > kTopMost ? kAll : gather(b, slice, best.work, bound_top(b, k));
    if (n == kAll) {
        draw_from_all(b, slice, max);
    } else if (b.rank == 0) {
        put_in_order(b, n, k);
        draw_from_top(b, min(n, k));
    }
    return kSampled;
}

}  // namespace

extern "C" __global__ void FLINT_CLUSTER(8) __launch_bounds__(kThreads)
    decode_sample(const __grid_constant__ DecodeSampleArgs args) {
    extern __shared__ float shared_slice[];
    __shared__ Shared s;
    const uint32_t n_row = blockIdx.y;
    Block b{s, blockIdx.x, threadIdx.x % 32, threadIdx.x / 32, 0};
    if (threadIdx.x < kWords) s.out[threadIdx.x] = 0;
    if (threadIdx.x == 0) {
        s.bad = kAll;
        s.overflow = 0;
    }
    // A block's shared memory can be reached once the block runs.
    cluster_sync();
    pdl_wait();
    pdl_launch();
    const uint32_t each = (args.vocab + kClusterBlocks - 1) / kClusterBlocks;
    const uint32_t first = min(b.rank * each, args.vocab);
    const float* logits = args.logits + uint64_t(n_row) * args.logits_stride;
    const Slice raw{logits + first, first, min(each, args.vocab - first)};
    Batch batch;
    batch.load(raw, threadIdx.x);
    if (threadIdx.x == 0) s.row = args.rows[n_row];
    __syncthreads();

    float* work = args.workspace == nullptr ? shared_slice : args.workspace + uint64_t(n_row) * args.vocab + first;

    const uint32_t chosen = choose(b, args, raw, batch, work);
    SampleRecord* record = args.ring + uint64_t(s.row.records % args.ring_lines) * args.ring_rows + n_row;
    if (threadIdx.x == 0) s.status = chosen;
    const bool reports = chosen == kSampled && s.row.flags & kSampleLogprobs;
    if (reports) logprobs(b, raw, logits, record);
    __syncthreads();
    if (b.rank == 0 && threadIdx.x == 0) {
        SampleRow& row = args.rows[n_row];
        const uint32_t token = s.token, status = s.status;
        record->sequence = s.row.records + 1;
        record->status = status;
        record->token = token;
        if (status != kSampled || !(s.row.flags & kSampleLogprobs)) {
            record->value =
                status == kSampleBadLogit ? args.logits[uint64_t(n_row) * args.logits_stride + token] : 0.0f;
            record->rank = 0;
            record->n_top = 0;
        }
        row.records = s.row.records + 1;
        if (status == kSampled) {
            args.tokens[n_row] = token;
            ++args.positions[n_row];
            row.output = s.row.output + 1;
            if (s.row.flags & kSamplePenalised) {
                uint32_t& seen = args.seen[uint64_t(n_row) * args.vocab + token];
                seen = max(seen, 1u) + 1;
            }
        }
    }
}
