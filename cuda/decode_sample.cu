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
//          one that enough threads' largest reach bounds them from below, and what reaches it is gathered in block 0.
//          Everything else takes as many passes over all logits as it takes to part the keys by four: 32 at worst,
//          about 12 in practice. Every sum is one of integers, so that no order matters.
// launch   grid (8, B) as clusters of 8, before sm_90 grid (1, B); block 1024. Dynamic shared memory: 4 bytes for each
//          logit of a block, or none with a workspace. V is at most 2^23
// bound    latency; B * V * 4 bytes, from L2
// PDL      waits before reading anything; triggers right after

#include "args_sample.h"
#include "cluster.cuh"
#include "common.cuh"
#include "sampling.cuh"

namespace {

constexpr uint32_t kAll = 0xFFFFFFFFu;
constexpr uint32_t kThreads = 1024;
constexpr uint32_t kWarps = kThreads / 32;
constexpr uint32_t kClusterBlocks = cluster_blocks(8);
// The most keys of a list in order.
constexpr uint32_t kTopMost = 64;
// The most candidates for it: one a thread of block 0.
constexpr uint32_t kListMost = kThreads;
// Words that a block gives to the others at a time.
constexpr uint32_t kWords = 8;
constexpr uint32_t kParts = 4;
static_assert(2 * kParts <= kWords && kTopMost <= kThreads && kClusterBlocks * kWords <= kThreads);

struct Shared {
    SampleRow row;
    uint64_t out[kWords];                       // this block's words
    uint64_t board[2][kClusterBlocks][kWords];  // all blocks' words, of this exchange and of the last
    uint64_t total[kWords];                     // over all blocks
    uint64_t warps[kWarps];
    uint64_t sums[kWarps][kWords];
    Key list[kListMost];
    Key kept[kTopMost];
    Key top[kTopMost];
    uint64_t weights[kTopMost];
    uint64_t kept_mass;
    uint32_t listed;
    uint32_t n_kept;
    uint32_t bad;
    uint32_t overflow;
    uint32_t token;
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

// Puts the block's largest key into `out[i]`.
__device__ void block_max(Block& b, Key key, uint32_t i) {
    key = warp_max(key);
    __syncthreads();
    if (b.lane == 0) b.s.warps[b.warp] = key;
    __syncthreads();
    if (b.warp == 0) {
        key = warp_max(b.lane < kWarps ? b.s.warps[b.lane] : 0);
        if (b.lane == 0) b.s.out[i] = key;
    }
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

// A key that `least` to `most` threads' keys reach; kFloor + 1 if no more than `most` are above kFloor. `max` is at
// least every key. Ends, because keys differ: while more than `most` reach `low`, and fewer than `least` reach `high`,
// there is a key between them.
__device__ Key block_threshold(Key key, Key max, uint32_t least, uint32_t most) {
    Key low = kFloor + 1, high = max + 1;
    uint32_t count = __syncthreads_count(key >= low);
    while (count > most) {
        const Key middle = low + (high - low) / 2;
        const uint32_t reach = __syncthreads_count(key >= middle);
        if (reach >= least) {
            low = middle;
            count = reach;
        } else {
            high = middle;
        }
    }
    return low;
}

// A bound that is reached by the fewest of the row's first keys whose measures add up to `need`, and perhaps by keys of
// measure 0; `low` if all that reach `low` do not add up to it. Each pass divides the keys from `low` to `low + width`
// into up to four parts and goes on in the one where the sum reaches `need`, until that one holds a single key.
template <typename Measure>
__device__ Key select(Block& b, const Slice& slice, const Measure& measure, Key low, Key max, uint64_t need) {
    Shared& s = b.s;
    uint64_t width = max + 1 - low;
    for (;;) {
        const int shift = ::max(62 - __clzll(width - 1), 0);
        uint64_t mass[kParts] = {};
        uint32_t count[kParts] = {};
        for (uint32_t i = threadIdx.x; i < slice.n; i += kThreads) {
            const Key key = slice.key(i);
            if (key < low || key - low >= width) continue;
            const uint64_t m = measure(key);
            const uint32_t in = (key - low) >> shift;
#pragma unroll
            for (uint32_t part = 0; part < kParts; ++part) {
                if (part == in) {
                    mass[part] += m;
                    count[part] += m != 0;
                }
            }
        }
#pragma unroll
        for (uint32_t part = 0; part < kParts; ++part) {
            const uint64_t m = warp_add_sums(mass[part]);
            const uint32_t n = __reduce_add_sync(kAll, count[part]);
            if (b.lane == 0) {
                s.sums[b.warp][part] = m;
                s.sums[b.warp][kParts + part] = n;
            }
        }
        add_sums(b, 2 * kParts);

        uint32_t part = kParts - 1;
        while (s.total[part] < need && part > 0) need -= s.total[part--];
        if (s.total[part] < need) return low;
        low += uint64_t(part) << shift;
        width = 1ull << shift;
        if (s.total[kParts + part] == 1) return low;
    }
}

// Leaves the row's `k` first keys in order in `top` of block 0, which gets their number: fewer when fewer are possible.
// `best` is the thread's largest key, `max` the row's; `k` is at most kTopMost.
__device__ uint32_t top_keys(Block& b, const Slice& slice, uint32_t k, Key best, Key max) {
    Shared& s = b.s;
    Key from = block_threshold(best, max, k, k + k / 2);
    for (;;) {
        if (threadIdx.x == 0) s.listed = 0;
        __syncthreads();
        if (best >= from) {
            for (uint32_t i = threadIdx.x; i < slice.n; i += kThreads) {
                const Key key = slice.key(i);
                if (key < from) continue;
                const uint32_t at = atomicAdd(&s.listed, 1);
                if (at < kListMost) s.list[at] = key;
            }
        }
        __syncthreads();
        if (threadIdx.x == 0) s.out[0] = s.listed;
        exchange_sums(b);
        if (s.total[0] <= kListMost) break;
        // Large keys stood together, so that few threads had many: there are k exactly after this.
        from = select(b, slice, [](Key) { return uint64_t(1); }, kFloor + 1, max, k);
    }
    if (b.rank != 0) return 0;

    Key key = 0;
    uint32_t at = threadIdx.x;
    for (uint32_t r = 0; r < kClusterBlocks; ++r) {
        const uint32_t listed = b.word(r, 0);
        if (at < listed) {
            key = cluster_peer(s.list, r)[at];
            break;
        }
        at -= listed;
    }
    if (threadIdx.x == 0) s.n_kept = 0;
    from = block_threshold(key, max, k, k);
    if (key >= from) s.kept[atomicAdd(&s.n_kept, 1)] = key;
    __syncthreads();
    const uint32_t n = s.n_kept;
    if (threadIdx.x < n) {
        const Key mine = s.kept[threadIdx.x];
        uint32_t before = 0;
        for (uint32_t i = 0; i < n; ++i) before += s.kept[i] > mine;
        s.top[before] = mine;
    }
    __syncthreads();
    return n;
}

// Draws from the `n` keys in `top`; block 0 only. Leaves the token in `token`.
__device__ void draw_from_top(Shared& s, uint32_t n, uint64_t random) {
    const uint32_t t = threadIdx.x;
    const bool active = t < n;
    const Key key = active ? s.top[t] : 0;
    uint64_t w = 0;
    if (active) {
        w = Weigh{key_logit(s.top[0]), s.row.temperature, s.row.least}(key);
        s.weights[t] = w;
    }
    __syncthreads();
    // Those with a weight stand first: weights do not rise along the keys.
    uint64_t total = 0, before = 0;
    if (active) {
        for (uint32_t i = 0; i < n; ++i) {
            before += i < t ? s.weights[i] : 0;
            total += s.weights[i];
        }
        const uint64_t need = nucleus_need(total, s.row.share);
        if (before >= need) w = 0;
        if (before < need && before + w >= need) s.kept_mass = before + w;
    }
    __syncthreads();
    if (active) s.weights[t] = w;
    __syncthreads();
    if (active) {
        const uint64_t r = __umul64hi(random, s.kept_mass);
        uint64_t sum = 0;
        for (uint32_t i = 0; i < n; ++i) sum += key_token(s.top[i]) < key_token(key) ? s.weights[i] : 0;
        if (sum <= r && r - sum < w) s.token = key_token(key);
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
__device__ void draw_from_all(Block& b, const Slice& slice, Key max, uint64_t random) {
    Shared& s = b.s;
    const Weigh weigh{key_logit(max), s.row.temperature, s.row.least};
    Key from = kFloor + 1;
    if (s.row.top_k != 0) from = select(b, slice, [](Key) { return uint64_t(1); }, from, max, s.row.top_k);
    uint64_t total = weigh_all(b, slice, weigh, from);
    if (s.row.share < 1ull << 32) {
        from = select(b, slice, weigh, from, max, nucleus_need(total, s.row.share));
        total = weigh_all(b, slice, weigh, from);
    }

    uint64_t r = __umul64hi(random, total), before = 0;
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

// Log-probabilities of `token` of block 0, and of the most likely ones, under the raw logits, whose first key is `max`.
__device__ void logprobs(Block& b, const Slice& raw, const float* logits, Key max, SampleRecord* record) {
    Shared& s = b.s;
    if (threadIdx.x == 0) s.out[0] = b.rank == 0 ? s.token : 0;
    exchange_sums(b);
    const uint32_t token = s.total[0];
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
    if (s.row.top_n != 0) n = top_keys(b, raw, s.row.top_n, best, max);
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

// Fills `work`, which has room for `raw.n`, with what the row makes of its raw logits.
template <bool kPlain>
__device__ Best fill(Shared& s, const DecodeSampleArgs& args, const Slice& raw, float* work) {
    constexpr float kInfinity = __builtin_huge_valf();
    constexpr uint32_t kBatch = 8;  // loads in flight
    const SampleRow row = s.row;
    const uint64_t start = uint64_t(blockIdx.y) * args.vocab;
    const uint32_t mask_words = (args.vocab + 31) / 32;
    const uint32_t* mask = args.masks + uint64_t(2 * blockIdx.y + (row.output < row.min_tokens)) * mask_words;
    float best = -kInfinity, raw_best = -kInfinity;
    uint32_t best_token = 0, raw_best_token = 0, bad = kAll;
    bool overflow = false;
    for (uint32_t base = threadIdx.x; base < raw.n; base += kBatch * kThreads) {
        float logits[kBatch];
#pragma unroll
        for (uint32_t j = 0; j < kBatch; ++j) {
            const uint32_t i = base + j * kThreads;
            logits[j] = i < raw.n ? raw.values[i] : -kInfinity;
        }
#pragma unroll
        for (uint32_t j = 0; j < kBatch; ++j) {
            const uint32_t i = base + j * kThreads, token = raw.first + i;
            if (i >= raw.n) break;
            float logit = logits[j];
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
__device__ uint32_t choose(Block& b, const DecodeSampleArgs& args, const Slice& raw, float* work, Key& raw_max) {
    Shared& s = b.s;
    constexpr uint32_t kChanged = kSampleMasked | kSampleBiased | kSamplePenalised;
    const Best best = s.row.flags & kChanged ? fill<false>(s, args, raw, work) : fill<true>(s, args, raw, work);
    block_max(b, best.work, 0);
    block_max(b, best.raw, 1);
    if (threadIdx.x == 0) {
        s.out[2] = s.bad == kAll ? 0 : ~s.bad;
        s.out[3] = s.overflow;
    }
    exchange(b, larger);
    const Key max = s.total[0];
    raw_max = s.total[1];
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
    const uint64_t random = random_bits(s.row.seed, s.row.output);
    if (s.row.top_k == 0 || s.row.top_k > kTopMost) {
        draw_from_all(b, slice, max, random);
    } else {
        const uint32_t n = top_keys(b, slice, s.row.top_k, best.work, max);
        if (b.rank == 0) draw_from_top(s, n, random);
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
    if (threadIdx.x == 0) s.row = args.rows[n_row];
    __syncthreads();

    const uint32_t each = (args.vocab + kClusterBlocks - 1) / kClusterBlocks;
    const uint32_t first = min(b.rank * each, args.vocab);
    const float* logits = args.logits + uint64_t(n_row) * args.logits_stride;
    const Slice raw{logits + first, first, min(each, args.vocab - first)};
    float* work = args.workspace == nullptr ? shared_slice : args.workspace + uint64_t(n_row) * args.vocab + first;
    SampleRecord* record = args.ring + uint64_t(s.row.records % args.ring_lines) * args.ring_rows + n_row;

    Key raw_max = 0;
    const uint32_t status = choose(b, args, raw, work, raw_max);
    const bool reports = status == kSampled && s.row.flags & kSampleLogprobs;
    if (reports) logprobs(b, raw, logits, raw_max, record);
    if (b.rank == 0 && threadIdx.x == 0) {
        SampleRow& row = args.rows[n_row];
        const uint32_t token = s.token;
        record->sequence = s.row.records + 1;
        record->status = status;
        record->token = token;
        if (!reports) {
            record->value = status == kSampleBadLogit ? logits[token] : 0.0f;
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
    // Block 0 reads the lists of others.
    cluster_sync();
}
