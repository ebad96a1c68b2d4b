//! Tokens a second of the CPU backend beside what the machine can do, measured in the same minute.
//!
//! `cargo bench --bench cpu_report -- [MODEL] [--csv FILE] [--rounds N]`: MODEL is a checkpoint to measure beside the 1.2 GB
//! synthetic Flint; FILE gets one more row a model and round. Other work on the cores slows the model and the machine's own
//! figures alike, so the shares are what to compare; the best round is the least disturbed.

use std::{
    error::Error,
    fs::OpenOptions,
    hint::black_box,
    io::Write,
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant, SystemTime},
};

use flint_rs::{
    cancel::Cancel,
    checkpoint::{Checkpoint, DType},
    config::{Attention, FlintConfig},
    cpu::{CpuModel, Options, Path, Positions, Precision},
    weights::{Matrix, MlpWeights, SwiGlu, Weights},
};

const PROMPT_TOKENS: usize = 512;
const CSV_HEAD: &str = "unix_seconds,cpu,threads,model,layers,hidden,experts,experts_per_token,read_gb_s,fma_gflop_s,\
decode_tokens_s,decode_gb_s,decode_share,prefill_tokens_s,prefill_gflop_s,prefill_share";

type Outcome<T = ()> = Result<T, Box<dyn Error>>;

struct Arguments {
    model: Option<PathBuf>,
    csv: Option<PathBuf>,
    rounds: usize,
}

fn main() -> Outcome {
    let arguments = arguments()?;
    let mut models = Vec::new();
    if let Some(path) = &arguments.model {
        models.push((path.display().to_string(), load(path)?));
    }
    models.push(("synthetic".into(), Arc::new(Weights::synthetic(synthetic_config(), 1, DType::Nvfp4)?)));
    for _ in 0..arguments.rounds {
        for (name, weights) in &models {
            let row = measure(name, weights)?;
            if let Some(path) = &arguments.csv {
                let mut file = OpenOptions::new().create(true).append(true).open(path)?;
                if file.metadata()?.len() == 0 {
                    writeln!(file, "{CSV_HEAD}")?;
                }
                writeln!(file, "{row}")?;
            }
        }
    }
    Ok(())
}

fn arguments() -> Outcome<Arguments> {
    let mut found = Arguments { model: None, csv: None, rounds: 3 };
    let mut all = std::env::args().skip(1);
    while let Some(argument) = all.next() {
        match argument.as_str() {
            "--bench" => {} // cargo adds it
            "--csv" => found.csv = Some(all.next().ok_or("--csv: a file name is missing")?.into()),
            "--rounds" => found.rounds = all.next().ok_or("--rounds: a number is missing")?.parse()?,
            _ if argument.starts_with('-') || found.model.is_some() => {
                return Err(format!("{argument}: expected [MODEL] [--csv FILE] [--rounds N]").into());
            }
            _ => found.model = Some(argument.into()),
        }
    }
    Ok(found)
}

fn load(path: &std::path::Path) -> Outcome<Arc<Weights>> {
    let checkpoint = Checkpoint::open(path)?;
    let config = FlintConfig::from_checkpoint(&checkpoint)?;
    Ok(Arc::new(Weights::bind(&checkpoint, config, &mut |_, _| {}, &Cancel::default())?))
}

/// Flint's widths with 10 of 49 layers and 64 of 256 experts.
fn synthetic_config() -> FlintConfig {
    FlintConfig { n_experts: 64, ..FlintConfig::flint(10, 32_000) }
}

/// Measures machine and model, prints both, and returns the row for the CSV file.
fn measure(name: &str, weights: &Arc<Weights>) -> Outcome<String> {
    let threads = std::thread::available_parallelism()?.get();
    let (bandwidth, fma) = (read_bandwidth(threads), fma_rate(threads));
    let options = Options { precision: Precision::Bfloat16, path: Path::Fast, threads: None };
    let model = CpuModel::new(Arc::clone(weights), options)?;
    let cancel = Cancel::default();
    let config = &weights.config;
    let tokens: Vec<u32> =
        (0..PROMPT_TOKENS).map(|i| (i.wrapping_mul(2_654_435_761) >> 7) as u32 % config.vocab_size as u32).collect();

    let mut kv = model.new_kv();
    let prefill = best(3, || {
        kv = model.new_kv();
        model.forward(&mut kv, &tokens, Positions::Last, &cancel)
    })?;
    let mut next = tokens.iter().cycle();
    let decode = best(40, || model.forward(&mut kv, &[*next.next().unwrap_or(&0)], Positions::Last, &cancel))?;

    let (bytes, values) = active(weights);
    let flop = 2.0 * values * PROMPT_TOKENS as f64 + attention_flop(config);
    let (decode_gb, prefill_gflop) = (bytes / decode / 1e9, flop / prefill / 1e9);
    let (decode_share, prefill_share) = (bytes / decode / bandwidth, flop / prefill / fma);
    let (bandwidth, fma) = (bandwidth / 1e9, fma / 1e9);
    let (decode, prefill) = (1.0 / decode, PROMPT_TOKENS as f64 / prefill);
    println!("{name}: {threads} threads read {bandwidth:.1} GB/s and compute {fma:.1} GFLOP/s");
    println!(
        "  decode  {decode:6.1} tokens/s  {decode_gb:6.1} GB/s      {:3.0} % of the read bandwidth",
        100.0 * decode_share
    );
    println!(
        "  prefill {prefill:6.1} tokens/s  {prefill_gflop:6.1} GFLOP/s   {:3.0} % of the FMA rate",
        100.0 * prefill_share
    );
    let seconds = SystemTime::UNIX_EPOCH.elapsed()?.as_secs();
    Ok(format!(
        "{seconds},{},{threads},{name},{},{},{},{},{bandwidth:.2},{fma:.2},{decode:.2},{decode_gb:.2},{decode_share:.3},\
         {prefill:.2},{prefill_gflop:.2},{prefill_share:.3}",
        cpu_name(),
        config.layers.len(),
        config.hidden_size,
        config.n_experts,
        config.n_experts_per_token,
    ))
}

/// Seconds of the fastest of `n` runs.
fn best<T>(n: usize, mut run: impl FnMut() -> flint_rs::Result<T>) -> Outcome<f64> {
    let mut best = Duration::MAX;
    for _ in 0..n {
        let start = Instant::now();
        black_box(run()?);
        best = best.min(start.elapsed());
    }
    Ok(best.as_secs_f64())
}

/// Packed bytes and values of the matrices that one token reads.
fn active(weights: &Weights) -> (f64, f64) {
    let mut total = (0.0, 0.0);
    let mut add = |times: usize, matrices: &[&Matrix]| {
        for matrix in matrices {
            total.0 += (times * matrix.rows * matrix.row_bytes()) as f64;
            total.1 += (times * matrix.rows * matrix.cols) as f64;
        }
    };
    for layer in &weights.layers {
        add(1, &[&layer.q, &layer.k, &layer.v, &layer.o]);
        match &layer.mlp {
            MlpWeights::Dense(SwiGlu { gate, up, down }) => add(1, &[gate, up, down]),
            MlpWeights::Moe { router, experts, shared } => {
                add(1, &[router, &shared.gate, &shared.up, &shared.down]);
                let SwiGlu { gate, up, down } = &experts[0];
                add(weights.config.n_experts_per_token, &[gate, up, down]);
            }
        }
    }
    add(1, &[&weights.lm_head]);
    total
}

/// Of scores and weighted values over the positions that each token of the prompt sees.
fn attention_flop(config: &FlintConfig) -> f64 {
    let seen = |window: usize| (1..=PROMPT_TOKENS).map(|n| n.min(window)).sum::<usize>();
    let pairs: usize = config
        .layers
        .iter()
        .map(|layer| seen(if layer.attention == Attention::Full { PROMPT_TOKENS } else { config.sliding_window }))
        .sum();
    (4 * pairs * config.n_heads * config.head_dim) as f64
}

/// The processor as the system names it.
fn cpu_name() -> String {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = info.lines().find_map(|line| line.strip_prefix("model name")).unwrap_or("unknown");
    name.trim_matches([':', ' ', '\t']).replace(',', " ")
}

/// Bytes a second that all threads together read from buffers far larger than the caches.
fn read_bandwidth(threads: usize) -> f64 {
    const WORDS: usize = 32 << 20;
    let buffers: Vec<Vec<u64>> = (0..threads).map(|_| vec![1; WORDS]).collect();
    let read = |buffer: &Vec<u64>| {
        let sums = buffer.chunks_exact(32).fold([0_u64; 32], |mut sums, chunk| {
            for (sum, x) in sums.iter_mut().zip(chunk) {
                *sum ^= x;
            }
            sums
        });
        black_box(sums);
    };
    (threads * WORDS * size_of::<u64>()) as f64 / fastest(&buffers, read)
}

/// Floating-point operations a second of all threads together in fused multiply-adds on registers; 0 without AVX2 and FMA.
fn fma_rate(threads: usize) -> f64 {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
        const STEPS: usize = 10_000_000;
        // SAFETY: the instructions were detected.
        let seconds = fastest(&vec![(); threads], |()| unsafe { fma_steps(STEPS) });
        return (threads * STEPS * 12 * 16) as f64 / seconds;
    }
    0.0
}

/// Twelve chains hide the latency.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn fma_steps(steps: usize) {
    use std::arch::x86_64::{_mm256_fmadd_ps, _mm256_set1_ps};
    let (a, b) = (_mm256_set1_ps(black_box(0.5)), _mm256_set1_ps(black_box(1.0)));
    let mut sums = [b; 12];
    for _ in 0..steps {
        for sum in &mut sums {
            *sum = _mm256_fmadd_ps(*sum, a, b);
        }
    }
    black_box(sums);
}

/// Seconds of the fastest of several runs of `work`, each item on its own thread.
fn fastest<T: Sync>(items: &[T], work: impl Fn(&T) + Sync) -> f64 {
    let mut best = Duration::MAX;
    for _ in 0..5 {
        let start = Instant::now();
        std::thread::scope(|scope| {
            for item in items {
                scope.spawn(|| work(item));
            }
        });
        best = best.min(start.elapsed());
    }
    best.as_secs_f64()
}
