//! The `decode_sample` kernel against the CPU's sampler, token for token. They need a GPU, so `cargo test` counts them as
//! ignored; `make test-gpu` runs them.

#![cfg(feature = "cuda")]

mod cpu_support;

use cpu_support::{Random, affordable};
use flint_rs::{
    gpu::{Buffer, Device, Function, IMAGES, Pinned},
    kernels::{
        DECODE_SAMPLE, DecodeSampleArgs, Launch, SAMPLE_RECORD_WORDS, SAMPLE_ROW_BYTES, SampleRecord, SampleStart,
        decode_sample_launch,
    },
    sampling::{Logprob, Sampled, Sampler, SamplingParams, TokenLogprobs},
};

/// Random batches of requests a run.
const CASES: usize = 300;
const VOCAB_SIZES: [usize; 8] = [1, 31, 33, 1001, 8192, 8193, 20_011, 150_144];
const FLINT: usize = 150_144;
/// Rows of the sampler's memory; a step uses the first few.
const ROWS: usize = 9;
const RING_LINES: usize = 3;
const FIRST_POSITION: u32 = 100;
/// Words that nobody may write, or read and use.
const POISON: u32 = 0xFFFF_FFFF;

/// Flint's vocabulary, or a part where that takes too long.
fn flint() -> usize {
    *[FLINT, 20_011].iter().find(|&&vocab| affordable(vocab / 100)).unwrap_or(&2503)
}

/// Steps, or few where they take too long.
fn steps(most: usize) -> usize {
    if affordable(200) { most } else { 2 }
}

struct Gpu {
    device: Device,
    sample: Function,
    major: i32,
}

impl Gpu {
    fn open() -> Self {
        let device = Device::open().expect("make test-gpu runs on a machine with a GPU");
        println!("device: {}", device.name().unwrap());
        let sample = device.kernels(IMAGES).get(DECODE_SAMPLE).unwrap();
        let (major, _) = device.capability();
        Self { device, sample, major }
    }

    fn poisoned(&self, words: usize) -> Buffer {
        self.device.upload(&vec![0xFF; 4 * words]).unwrap()
    }
}

fn u32s(bytes: &[u8]) -> Vec<u32> {
    bytes.as_chunks::<4>().0.iter().map(|&word| u32::from_le_bytes(word)).collect()
}

fn f32_bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

/// The sampler's memory for some rows.
struct Memory<'a> {
    gpu: &'a Gpu,
    n_rows: usize,
    vocab_size: usize,
    stride: usize,
    logits: Buffer,
    rows: Buffer,
    masks: Buffer,
    bias: Buffer,
    seen: Buffer,
    workspace: Buffer,
    tokens: Buffer,
    positions: Buffer,
    ring: Pinned<u32>,
    ring_lines: usize,
}

impl<'a> Memory<'a> {
    fn new(gpu: &'a Gpu, starts: &[SampleStart], vocab_size: usize, ring_lines: usize) -> Self {
        let n_rows = starts.len();
        let mask_words = vocab_size.div_ceil(32);
        let stride = vocab_size + 5;
        let mut ring = gpu.device.pinned(ring_lines * ROWS * SAMPLE_RECORD_WORDS).unwrap();
        ring.as_mut_slice().fill(POISON);
        let memory = Self {
            gpu,
            n_rows,
            vocab_size,
            stride,
            logits: gpu.poisoned(n_rows * stride),
            rows: gpu.poisoned(ROWS * SAMPLE_ROW_BYTES / 4),
            // What is not given forbids every token.
            masks: gpu.device.upload(&vec![0; 4 * ROWS * 2 * mask_words]).unwrap(),
            bias: gpu.poisoned(ROWS * vocab_size),
            seen: gpu.poisoned(ROWS * vocab_size),
            workspace: gpu.poisoned(n_rows * vocab_size),
            tokens: gpu.poisoned(ROWS),
            positions: gpu.poisoned(ROWS),
            ring,
            ring_lines,
        };
        for (n, start) in starts.iter().enumerate() {
            memory.rows.write(n * SAMPLE_ROW_BYTES, &start.row.bytes()).unwrap();
            memory.positions.write(4 * n, &FIRST_POSITION.to_le_bytes()).unwrap();
            if let Some(masks) = &start.masks {
                let bytes: Vec<u8> = masks.iter().flat_map(|word| word.to_le_bytes()).collect();
                memory.masks.write(n * bytes.len(), &bytes).unwrap();
            }
            if let Some(bias) = &start.bias {
                memory.bias.write(4 * n * vocab_size, &f32_bytes(bias)).unwrap();
            }
            if let Some(seen) = &start.seen {
                let bytes: Vec<u8> = seen.iter().flat_map(|word| word.to_le_bytes()).collect();
                memory.seen.write(4 * n * vocab_size, &bytes).unwrap();
            }
        }
        memory
    }

    fn args(&self) -> (Launch, DecodeSampleArgs) {
        let launch = decode_sample_launch(self.n_rows, self.vocab_size, self.gpu.major);
        let args = DecodeSampleArgs {
            logits: self.logits.address(),
            rows: self.rows.address(),
            masks: self.masks.address(),
            bias: self.bias.address(),
            seen: self.seen.address(),
            workspace: self.workspace.address(),
            tokens: self.tokens.address(),
            positions: self.positions.address(),
            ring: self.ring.address(),
            vocab: self.vocab_size as u32,
            logits_stride: self.stride as u32,
            ring_lines: self.ring_lines as u32,
            ring_rows: ROWS as u32,
        };
        (launch, args)
    }

    fn set_logits(&self, rows: &[Vec<f32>]) {
        for (n, logits) in rows.iter().enumerate() {
            self.logits.write(4 * n * self.stride, &f32_bytes(logits)).unwrap();
        }
    }

    fn step(&self, pdl: bool) {
        let (launch, args) = self.args();
        // SAFETY: the buffers have the extents that `args` states, and are read back, which waits, before they go.
        unsafe { self.gpu.sample.launch(launch, pdl, &args) }.unwrap();
    }

    /// The record of row `n` after `step`, counted from 0. The device was waited for.
    fn record(&self, step: usize, n: usize) -> [u32; SAMPLE_RECORD_WORDS] {
        let start = (step % self.ring_lines * ROWS + n) * SAMPLE_RECORD_WORDS;
        std::array::from_fn(|i| self.ring.get(start + i))
    }
}

struct Request {
    params: SamplingParams,
    prompt: Vec<u32>,
    ends: Vec<u32>,
}

impl Request {
    fn plain(params: SamplingParams) -> Self {
        Self { params: SamplingParams { seed: Some(params.seed.unwrap_or(7)), ..params }, prompt: vec![], ends: vec![] }
    }

    fn sampler(&self, vocab_size: usize) -> Sampler {
        Sampler::new(&self.params, &self.prompt, &self.ends, vocab_size).unwrap()
    }

    fn start(&self, vocab_size: usize) -> SampleStart {
        let seed = self.sampler(vocab_size).seed();
        SampleStart::new(&self.params, seed, [&self.prompt, &[]], &self.ends, vocab_size, 0).unwrap()
    }
}

fn starts(requests: &[Request], vocab_size: usize) -> Vec<SampleStart> {
    requests.iter().map(|request| request.start(vocab_size)).collect()
}

/// Runs the requests as the rows of some steps on `logits(random, row)`, beside CPU samplers.
fn check(
    gpu: &Gpu,
    random: &mut Random,
    vocab_size: usize,
    requests: &[Request],
    logits: impl Fn(&mut Random, usize) -> Vec<f32>,
) {
    let memory = Memory::new(gpu, &starts(requests, vocab_size), vocab_size, RING_LINES);
    let mut samplers: Vec<_> = requests.iter().map(|request| request.sampler(vocab_size)).collect();
    let mut outputs = vec![vec![]; requests.len()];
    for step in 0..steps(8) {
        let rows: Vec<_> = (0..requests.len()).map(|n| logits(random, n)).collect();
        memory.set_logits(&rows);
        memory.step(step % 4 >= 2);
        let tokens = u32s(&memory.tokens.download().unwrap());
        let positions = u32s(&memory.positions.download().unwrap());
        for n in 0..ROWS {
            let words = memory.record(step, n);
            let Some(request) = requests.get(n) else {
                assert_eq!((tokens[n], positions[n], words), (POISON, POISON, [POISON; _]), "unused row {n}");
                continue;
            };
            let what = format!("step {step}, row {n} of {}, V {vocab_size}, {:?}", requests.len(), request.params);
            let record = SampleRecord::new(&words);
            assert_eq!(record.sequence, step as u32 + 1, "{what}");
            let output: &mut Vec<u32> = &mut outputs[n];
            let found = record.sampled(&request.params, output.len());
            match (found, samplers[n].sample(&rows[n])) {
                (Ok(found), Ok(expected)) => {
                    assert_same(&found, &expected, &what);
                    output.push(expected.token_id);
                }
                (Err(found), Err(expected)) => assert_eq!(found.to_string(), expected.to_string(), "{what}"),
                (found, expected) => panic!("{what}: {found:?}, expected {expected:?}"),
            }
            let last = output.last().copied().unwrap_or(POISON);
            assert_eq!((tokens[n], positions[n]), (last, FIRST_POSITION + output.len() as u32), "{what}");
        }
    }
    let seen = u32s(&memory.seen.download().unwrap());
    for (n, seen) in seen.chunks_exact(vocab_size).enumerate() {
        let expected = requests.get(n).and_then(|request| {
            let tokens = [&request.prompt[..], &outputs[n]];
            SampleStart::new(&request.params, 0, tokens, &[], vocab_size, 0).unwrap().seen
        });
        assert!(expected.unwrap_or_else(|| vec![POISON; vocab_size]) == seen, "counts of row {n}");
    }
}

fn assert_same(found: &Sampled, expected: &Sampled, what: &str) {
    assert_eq!(found.token_id, expected.token_id, "{what}");
    let all = |logprobs: &Option<TokenLogprobs>| -> Option<Vec<Logprob>> {
        logprobs.as_ref().map(|logprobs| [&[logprobs.chosen][..], &logprobs.top].concat())
    };
    let (found, expected) = (all(&found.logprobs), all(&expected.logprobs));
    let ids = |list: &Option<Vec<Logprob>>| -> Option<Vec<_>> {
        list.as_ref().map(|list| list.iter().map(|entry| (entry.token_id, entry.rank)).collect())
    };
    assert_eq!(ids(&found), ids(&expected), "{what}");
    for (found, expected) in found.iter().flatten().zip(expected.iter().flatten()) {
        let (found, expected) = (found.logprob, expected.logprob);
        // 3e-7 by the weights' sum, and one step of f32 where that crosses a border of rounding.
        let bound = 2e-6f32.max(expected.abs() * f32::EPSILON);
        assert!(
            found.to_bits() == expected.to_bits() || (found - expected).abs() <= bound,
            "{what}: {found}, {expected}"
        );
    }
}

/// One of `values`.
fn one_of<T: Copy>(random: &mut Random, values: &[T]) -> T {
    values[random.below(values.len())]
}

/// Logits of many kinds; some are refused.
fn any_logits(random: &mut Random, vocab_size: usize) -> Vec<f32> {
    let mut logits = random.normals(vocab_size);
    let (a, b) = (random.below(vocab_size), random.below(vocab_size));
    match random.below(16) {
        0 => logits[a] = 40.0,
        1 => logits.fill(one_of(random, &[0.0, -3.5, 1e30, -1e-40])),
        2 => logits.iter_mut().for_each(|x| *x = x.round()),
        3 => {
            logits.fill(f32::NEG_INFINITY);
            logits[a] = -5.0;
        }
        4 => logits.iter_mut().for_each(|x| *x = if *x < 1.0 { f32::NEG_INFINITY } else { *x * 5.0 }),
        5 => logits.sort_by(|x, y| y.total_cmp(x)),
        // Large ones that few threads hold.
        6 => logits.iter_mut().skip(a % 64).step_by(64).for_each(|x| *x += 20.0),
        7 => logits.iter_mut().for_each(|x| *x = if *x > 0.0 { 0.0 } else { -0.0 }),
        8 => logits.iter_mut().for_each(|x| *x *= 1e38),
        9 => logits.iter_mut().for_each(|x| *x = *x * 0.01 - 80.0),
        10 if random.below(8) == 0 => {
            logits[a] = one_of(random, &[f32::NAN, f32::INFINITY, -f32::NAN]);
            logits[b] = one_of(random, &[f32::NAN, f32::INFINITY]);
        }
        11 if random.below(8) == 0 => logits.fill(f32::NEG_INFINITY),
        _ => logits.iter_mut().for_each(|x| *x *= 3.0),
    }
    logits
}

fn any_request(random: &mut Random, vocab_size: usize) -> Request {
    let normal = SamplingParams::default();
    let some = |random: &mut Random, most: usize| {
        let n = random.below(most + 1);
        random.tokens(n, vocab_size)
    };
    let mut params = SamplingParams {
        seed: Some(random.bits()),
        temperature: one_of(random, &[1.0, 1.0, 0.0, 0.7, 1.8, 1e-6, 1e4, 1e-40]),
        top_k: one_of(random, &[20, 20, 1, 2, 5, 63, 64, 65, 500, 0, -1, -1, vocab_size as i64, i64::MAX]),
        top_p: one_of(random, &[0.95, 1.0, 0.5, 1e-12, 0.1, 1.0 - f32::EPSILON / 2.0]),
        min_p: one_of(random, &[0.0, 0.0, 0.05, 1e-9, 0.4, 1.0]),
        logprobs: one_of(random, &[None, None, Some(0), Some(1), Some(7), Some(20)]),
        ..normal
    };
    if random.below(3) == 0 {
        params.repetition_penalty = one_of(random, &[1.0, 1.3, 0.8, 1e-38, 3e38]);
        params.frequency_penalty = one_of(random, &[0.0, 0.5, -2.0, 1.7]);
        params.presence_penalty = one_of(random, &[0.0, 1.0, -0.3]);
    }
    if random.below(3) == 0 {
        let ids = some(random, 40);
        params.logit_bias = ids.iter().map(|&id| (id, random.normal() * 10.0)).collect();
    }
    if random.below(5) == 0 {
        params.allowed_token_ids = Some([some(random, 300), random.tokens(1, vocab_size)].concat());
    }
    if random.below(4) == 0 {
        params.banned_token_ids = some(random, 60);
    }
    if random.below(3) == 0 {
        params.min_tokens = random.below(7);
        params.stop_token_ids = some(random, 10);
    }
    Request { params, prompt: some(random, 200), ends: some(random, 3) }
}

#[test]
#[ignore = "needs a CUDA GPU: make test-gpu"]
fn random_requests_choose_as_on_the_cpu() {
    let (gpu, mut random) = (Gpu::open(), Random::fresh());
    let flint = flint();
    // The number of a case stands for its size: so there are as many as can be afforded.
    for _ in (0..CASES).filter(|case| affordable(50 * case)) {
        let vocab_size = one_of(&mut random, &VOCAB_SIZES).min(flint);
        let n_rows = 1 + random.below(ROWS);
        let requests: Vec<_> = (0..n_rows).map(|_| any_request(&mut random, vocab_size)).collect();
        check(&gpu, &mut random, vocab_size, &requests, |random, _| any_logits(random, vocab_size));
    }
}

#[test]
#[ignore = "needs a CUDA GPU: make test-gpu"]
fn shapes_of_distributions_at_flints_size() {
    let (gpu, mut random) = (Gpu::open(), Random::fresh());
    let vocab = flint();
    let params = |temperature, top_k, top_p| SamplingParams { temperature, top_k, top_p, ..SamplingParams::default() };
    let requests = [
        params(0.0, 20, 0.95),
        params(1.0, 20, 0.95),
        params(1.0, 64, 1.0),
        params(1.0, 65, 0.9),
        params(1.0, 5000, 1.0),
        params(1.0, -1, 0.95),
        params(1.0, -1, 1.0),
        SamplingParams { min_p: 0.02, logprobs: Some(20), ..params(1.5, -1, 1.0) },
    ]
    .map(Request::plain);
    let scaled = |scale: f32| move |random: &mut Random, _| random.normals(vocab).iter().map(|x| x * scale).collect();
    // Flat, a model's, and peaked.
    for scale in [0.01, 2.5, 30.0] {
        check(&gpu, &mut random, vocab, &requests, scaled(scale));
    }
    check(&gpu, &mut random, vocab, &requests, |_, _| vec![2.0; vocab]);
    // Those of one thread of each block, then of a few warps, above the others.
    check(&gpu, &mut random, vocab, &requests, |random, n| {
        let mut logits = random.normals(vocab);
        logits.iter_mut().skip(n).step_by(1024).for_each(|x| *x += 8.0);
        logits
    });
    check(&gpu, &mut random, vocab, &requests, |random, n| {
        let mut logits = random.normals(vocab);
        for part in logits.chunks_mut(1024) {
            part.iter_mut().take(32 * (n + 1)).for_each(|x| *x += 8.0);
        }
        logits
    });
}

#[test]
#[ignore = "needs a CUDA GPU: make test-gpu"]
fn rows_write_the_same_records_alone_and_together() {
    let (gpu, mut random) = (Gpu::open(), Random::fresh());
    let vocab = flint();
    for vocab_size in [1001, vocab] {
        let requests: Vec<_> = (0..ROWS).map(|_| any_request(&mut random, vocab_size)).collect();
        let logits: Vec<_> = requests.iter().map(|_| any_logits(&mut random, vocab_size)).collect();
        let starts = starts(&requests, vocab_size);
        let records = |starts: &[SampleStart], logits: &[Vec<f32>]| -> Vec<_> {
            let memory = Memory::new(&gpu, starts, vocab_size, 1);
            memory.set_logits(logits);
            memory.step(false);
            gpu.device.synchronize("sampling").unwrap();
            (0..starts.len()).map(|n| memory.record(0, n)).collect()
        };
        let together = records(&starts, &logits);
        for (n, expected) in together.iter().enumerate() {
            let alone = records(&starts[n..=n], &logits[n..=n]);
            assert_eq!(alone, [*expected], "row {n}: {:?}", requests[n].params);
        }
    }
}

#[test]
#[ignore = "needs a CUDA GPU: make test-gpu"]
fn a_graph_goes_on_where_it_stood() {
    let (gpu, mut random, replays) = (Gpu::open(), Random::fresh(), steps(20));
    let vocab = flint();
    let requests: Vec<_> = (0..ROWS).map(|_| any_request(&mut random, vocab)).collect();
    let logits: Vec<_> = requests.iter().map(|_| random.normals(vocab)).collect();
    for pdl in [false, true] {
        let memory = Memory::new(&gpu, &starts(&requests, vocab), vocab, 2 * replays);
        memory.set_logits(&logits);
        let (launch, args) = memory.args();
        // SAFETY: the buffers have the extents that `args` states, and live until the stream was waited for.
        let calls = [(); 2].map(|()| unsafe { gpu.sample.call(launch, &args) }.unwrap());
        let graph = gpu.device.graph(&calls, pdl).unwrap();
        for _ in 0..replays {
            graph.launch().unwrap();
        }
        gpu.device.synchronize("sampling").unwrap();
        for (n, request) in requests.iter().enumerate() {
            let (mut sampler, mut output_tokens) = (request.sampler(vocab), 0);
            for step in 0..2 * replays {
                let what = format!("step {step}, row {n}, {:?}", request.params);
                let found = SampleRecord::new(&memory.record(step, n)).sampled(&request.params, output_tokens);
                match sampler.sample(&logits[n]) {
                    Ok(expected) => {
                        assert_same(&found.unwrap(), &expected, &what);
                        output_tokens += 1;
                    }
                    Err(expected) => assert_eq!(found.unwrap_err().to_string(), expected.to_string(), "{what}"),
                }
            }
        }
    }
}

/// Prints microseconds; the limits are far above what an H200 takes, and below what a step could afford.
#[test]
#[ignore = "needs a CUDA GPU: make test-gpu"]
fn a_choice_takes_microseconds() {
    const CALLS: usize = 200;
    let (gpu, mut random) = (Gpu::open(), Random::fresh());
    let normal = SamplingParams::default();
    // What a path that waits serially for its loads would take; other processes may use the card meanwhile.
    for (what, limit, params) in [
        ("greedy", 15.0, SamplingParams { temperature: 0.0, ..normal.clone() }),
        ("default", 40.0, normal.clone()),
        ("default with 20 logprobs", 90.0, SamplingParams { logprobs: Some(20), ..normal.clone() }),
        ("default with penalties", 60.0, SamplingParams { presence_penalty: 0.5, ..normal.clone() }),
        ("all tokens", 80.0, SamplingParams { top_k: 0, top_p: 1.0, ..normal.clone() }),
        ("top_p of all tokens", 400.0, SamplingParams { top_k: 0, ..normal.clone() }),
        ("top_k 1000 and top_p", 400.0, SamplingParams { top_k: 1000, ..normal.clone() }),
    ] {
        for n_rows in [1, 8] {
            let requests: Vec<_> = (0..n_rows).map(|_| Request::plain(params.clone())).collect();
            let logits: Vec<Vec<f32>> =
                requests.iter().map(|_| random.normals(FLINT).iter().map(|x| x * 2.5).collect()).collect();
            let memory = Memory::new(&gpu, &starts(&requests, FLINT), FLINT, 4);
            memory.set_logits(&logits);
            let (launch, args) = memory.args();
            // SAFETY: the buffers have the extents that `args` states, and live until the events were waited for.
            let calls: Vec<_> = (0..CALLS).map(|_| unsafe { gpu.sample.call(launch, &args) }.unwrap()).collect();
            let graph = gpu.device.graph(&calls, true).unwrap();
            let (start, end) = (gpu.device.event(true).unwrap(), gpu.device.event(true).unwrap());
            graph.launch().unwrap();
            start.record().unwrap();
            graph.launch().unwrap();
            end.record().unwrap();
            end.wait("sampling").unwrap();
            let each = end.elapsed_us(&start).unwrap() / CALLS as f64;
            println!("{what}, {n_rows} rows: {each:.2} us");
            assert!(each < limit || gpu.major < 9, "{what}, {n_rows} rows: {each} us");
        }
    }
}
