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

#include "sample_select.cuh"

namespace {

// Above the keys of all finite logits: that of plus infinity as token 0.
constexpr Key kInfinite = 0xFF800000FFFFFFFFull;

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
            __syncthreads();  // all have read what the search gathered
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
        copy_async_join();
        s.random = random_bits(s.row.seed, s.counts.output);
        s.position = position;
        s.record = args.ring + uint64_t(s.counts.records % args.ring_lines) * args.ring_rows + blockIdx.y;
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
    // Its counts are written by kernels, and come behind the wait.
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
    // Past an L1 that may have old ones.
    if (threadIdx.x == kThreads - 1) copy_async_16(&s.counts, &row.flags);
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
        record->sequence = s.counts.records + 1;
        record->status = status;
        record->token = status == kSampled || status == kSampleBadLogit ? token : 0;
        if (!reports) {
            record->value = status == kSampleBadLogit ? logits[token] : 0.0f;
            record->rank = 0;
            record->n_top = 0;
        }
        row.records = s.counts.records + 1;
        if (status == kSampled) {
            args.tokens[n_row] = token;
            args.positions[n_row] = s.position + 1;
            row.output = s.counts.output + 1;
            if (s.row.flags & kSamplePenalised) {
                uint32_t* seen = args.seen + uint64_t(n_row) * args.vocab + token;
                *seen = max(__ldcg(seen), 1u) + 1;
            }
        }
    }
}
