//! What a full-size synthetic Flint takes on this GPU, as CSV: whole steps, single kernels, and the decode loop.
//!
//! `gpu_report --synthetic nvfp4|bf16 --date 2026-01-31 [--layers 49] [--vocab 150144] [--contexts 1024,102400]
//! [--batches 1,8,64,256] [--out FILE]`; keys and values of the cache are random, prompts are not run.
//!
//! With `--prefill 512,8192 [--chunk 8192]` whole prompts instead, in columns of their own; with `--load FOLDER` how long a
//! file of the model's size takes from the page cache to the GPU.

#[cfg(feature = "cuda")]
fn main() {
    report::main();
}

#[cfg(not(feature = "cuda"))]
fn main() {
    println!("built without the feature cuda");
}

#[cfg(feature = "cuda")]
#[path = "gpu_report/load.rs"]
mod load;

#[cfg(feature = "cuda")]
#[path = "gpu_report/prefill.rs"]
mod prefill;

#[cfg(feature = "cuda")]
mod report {
    use std::{
        collections::{BTreeMap, BTreeSet},
        error::Error,
        ffi::CStr,
        fs::File,
        io::{Write, stdout},
        time::Instant,
    };

    use flint_rs::{
        cancel::Cancel,
        checkpoint::DType,
        config::FlintConfig,
        gpu::{Call, Device, GpuModel, IMAGES, RunOptions, SequenceId, Source},
        kernels::{SYNTHETIC_BF16, SampleStart, SyntheticArgs, synthetic_launch},
        plan::{CHUNK_TOKENS, Ending, H200_BYTES_PER_SECOND, Limits, Operation, Step, TOKEN_RING, Totals},
        sampling::SamplingParams,
    };

    use super::{load, prefill};

    /// Replays that are timed together, at most and for how long about, and how often.
    const REPLAYS: usize = 20;
    const SAMPLE_US: f64 = 8000.0;
    const SAMPLES: usize = 9;
    /// Steps of the decode loop before and while it is timed, in each of its two manners. They need room around the context.
    const WARM_UP: usize = 16;
    const TOKENS: usize = 128;
    /// Samplers of a chain that is timed.
    const SAMPLERS: usize = 8;
    const ROOM: usize = WARM_UP + 2 * TOKENS + 16;

    /// Most rows of a step whose kernels are left out in turn. In steps of more, buffers take turns with the same bytes, so
    /// that what is left out leaves other values behind, which route rows to other experts: another step.
    const IN_STEP_ROWS: usize = 8;

    pub(crate) type Result<T> = std::result::Result<T, Box<dyn Error>>;

    pub fn main() {
        if let Err(error) = run() {
            eprintln!("gpu_report: {error}");
            std::process::exit(1);
        }
    }

    struct Arguments {
        dtype: DType,
        date: String,
        config: FlintConfig,
        contexts: Vec<usize>,
        batches: Vec<usize>,
        prompts: Vec<usize>,
        chunk: usize,
        load_from: Option<String>,
        out: Box<dyn Write>,
    }

    fn arguments() -> Result<Arguments> {
        // cargo bench adds --bench.
        let words: Vec<String> = std::env::args().skip(1).filter(|word| word != "--bench").collect();
        let mut values = BTreeMap::new();
        for pair in words.chunks(2) {
            match pair {
                [name, value] if name.starts_with("--") => values.insert(name.as_str(), value.as_str()),
                other => return Err(format!("expected --NAME VALUE, found {other:?}").into()),
            };
        }
        let mut take = |name: &str| values.remove(name);
        let list = |text: &str| text.split(',').map(str::parse).collect::<std::result::Result<Vec<usize>, _>>();
        let dtype = match take("--synthetic") {
            Some("nvfp4") => DType::Nvfp4,
            Some("bf16") => DType::Bf16,
            other => return Err(format!("--synthetic: expected nvfp4 or bf16, found {other:?}").into()),
        };
        let config =
            FlintConfig::flint(take("--layers").unwrap_or("49").parse()?, take("--vocab").unwrap_or("150144").parse()?);
        let arguments = Arguments {
            dtype,
            date: take("--date").ok_or("--date: expected the day, as it is to stand in the rows")?.into(),
            contexts: list(take("--contexts").unwrap_or("1024,8192,32768,102400,262144"))?,
            batches: list(take("--batches").unwrap_or("1,2,4,8"))?,
            prompts: take("--prefill").map_or(Ok(Vec::new()), list)?,
            chunk: take("--chunk").map_or(Ok(CHUNK_TOKENS), str::parse)?,
            load_from: take("--load").map(str::to_owned),
            out: match take("--out") {
                Some(path) => Box::new(File::create(path)?),
                None => Box::new(stdout()),
            },
            config,
        };
        match values.into_keys().next() {
            Some(name) => Err(format!("{name}: not an option").into()),
            None => Ok(arguments),
        }
    }

    /// Writes rows of one run.
    struct Table {
        out: Box<dyn Write>,
        fixed: String,
    }

    impl Table {
        #[allow(clippy::too_many_arguments, reason = "the columns")]
        fn row(
            &mut self,
            context: usize,
            batch: usize,
            measure: &str,
            kernel: &str,
            n: usize,
            us: f64,
            bytes: u64,
        ) -> Result<()> {
            let rate = bytes as f64 / (us * 1e-6);
            writeln!(
                self.out,
                "{},{context},{batch},{measure},{kernel},{n},{us:.3},{:.3},{:.1},{:.3}",
                self.fixed,
                bytes as f64 / 1e6,
                rate / 1e9,
                rate / H200_BYTES_PER_SECOND,
            )?;
            Ok(self.out.flush()?)
        }
    }

    fn run() -> Result<()> {
        let Arguments { dtype, date, config, contexts, batches, prompts, chunk, load_from, mut out } = arguments()?;
        let most = |values: &[usize]| values.iter().copied().max().ok_or("an empty list");
        let (sequences, context) =
            if prompts.is_empty() { (most(&batches)?, most(&contexts)? + ROOM) } else { (1, most(&prompts)?) };
        let limits = Limits {
            sequences,
            context_tokens: context.min(config.context_length),
            vocab_tokens: config.vocab_size,
            chunk_tokens: chunk,
        };
        if let Some(folder) = load_from {
            return load::measure(&mut out, &date, &config, dtype, limits, &folder);
        }
        let start = Instant::now();
        let source = Source::Synthetic { config: &config, seed: 1, dtype };
        let mut model = GpuModel::load(source, limits, RunOptions::default(), &mut |_, _| {}, &Cancel::default())?;
        fill_cache(&model)?;
        eprintln!("{}\nready after {:.1} s", model.plan(), start.elapsed().as_secs_f64());
        let device = model.device();
        let fixed = format!("{date},{},{},{dtype},{}", device.name()?, device.driver()?, config.layers.len());
        if !prompts.is_empty() {
            let mut table = prefill::Table::new(out, fixed)?;
            return prompts.into_iter().try_for_each(|tokens| prefill::measure(&mut model, &mut table, tokens));
        }
        let mut table = Table { out, fixed };
        writeln!(table.out, "date,card,driver,format,layers,context,batch,measure,kernel,launches,us,mb,gb_s,share")?;
        for &context in &contexts {
            for &batch in &batches {
                measure(&mut model, &mut table, context.min(config.context_length - ROOM), batch)?;
            }
        }
        Ok(())
    }

    /// Random keys and values of size 1.
    fn fill_cache(model: &GpuModel) -> Result<()> {
        let kernel = model.device().kernels(IMAGES).get(SYNTHETIC_BF16)?;
        for (seed, (pool, _)) in (1..).zip(model.kv_pools()) {
            let n_elements = pool.len() as u64 / 2;
            let launch = synthetic_launch(n_elements, DType::Bf16).ok_or("a pool that no grid covers")?;
            let args =
                SyntheticArgs { out: pool.address(), n_elements, chunk_len: 1 << 40, seed, spread: 1.0, reserved: 0 };
            // SAFETY: the argument is of this kernel, and the pool, which outlives the wait below, has so many elements.
            unsafe { kernel.launch(launch, false, &args)? };
        }
        Ok(model.device().synchronize("filling the cache")?)
    }

    /// Sequences of `tokens` tokens, each with the token that comes then.
    fn sequences(model: &mut GpuModel, batch: usize, tokens: usize) -> Result<Vec<(SequenceId, u32)>> {
        let one = |token| {
            let id = model.add_sequence()?;
            model.skip(id, tokens)?;
            Ok((id, token))
        };
        (100..).take(batch).map(one).collect()
    }

    fn remove(model: &mut GpuModel, rows: Vec<(SequenceId, u32)>) {
        for (id, _) in rows {
            model.remove_sequence(id);
        }
    }

    fn measure(model: &mut GpuModel, table: &mut Table, context: usize, batch: usize) -> Result<()> {
        // The last token of the context, so that every buffer holds what a step leaves, and positions stand there.
        let rows = sequences(model, batch, context - 1)?;
        model.forward(&rows)?;

        let positions = vec![context as u32 - 1; batch];
        for (ending, name) in [(Ending::Nothing, "layers"), (Ending::Logits, "forward")] {
            let (steps, calls) = split(model.calls(&positions, ending)?);
            let totals = Totals::of(&steps);
            let us = time(model.device(), &calls)?;
            table.row(context, batch, name, "all", totals.kernels, us, totals.bytes)?;
        }
        kernels(model, table, context, &positions)?;
        if batch <= IN_STEP_ROWS {
            in_step(model, table, context, &positions)?;
        }
        remove(model, rows);
        // So that the mean of the loop's steps has this context.
        let rows = sequences(model, batch, context.saturating_sub(ROOM / 2))?;
        decode(model, table, context, &rows)?;
        remove(model, rows);
        Ok(())
    }

    /// Steps of one kind run the same kernel over as much; attention over a window and over everything differ.
    fn kind(step: &Step) -> (Operation, u32, &'static CStr) {
        (step.operation, step.launch.grid[0], step.kernel.symbol)
    }

    fn split(calls: Vec<(Step, Call)>) -> (Vec<Step>, Vec<Call>) {
        calls.into_iter().unzip()
    }

    /// Microseconds of one kernel of each kind, as part of a chain of all of its kind in the step: their weights are
    /// different ones, so they come from memory as they do in a step.
    fn kernels(model: &GpuModel, table: &mut Table, context: usize, positions: &[u32]) -> Result<()> {
        let mut groups: BTreeMap<_, Vec<(Step, Call)>> = BTreeMap::new();
        for (step, call) in model.calls(positions, Ending::Logits)? {
            groups.entry(kind(&step)).or_default().push((step, call));
        }
        for calls in groups.into_values() {
            let (steps, calls) = split(calls);
            let n = steps.len();
            let us = time(model.device(), &calls)? / n as f64;
            let kernel = steps[0].kernel.symbol.to_string_lossy();
            table.row(context, positions.len(), "kernel", &kernel, n, us, Totals::of(&steps).bytes / n as u64)?;
        }
        Ok(())
    }

    /// Microseconds that one kernel of each kind adds to the step: the whole without those of its kind is so much shorter. What
    /// they would have computed stands in the buffers from before.
    fn in_step(model: &GpuModel, table: &mut Table, context: usize, positions: &[u32]) -> Result<()> {
        let calls = model.calls(positions, Ending::Logits)?;
        let all = time(model.device(), &calls.iter().map(|(_, call)| call.clone()).collect::<Vec<_>>())?;
        let kinds: BTreeSet<_> = calls.iter().map(|(step, _)| kind(step)).collect();
        for removed in kinds {
            let (with, without): (Vec<_>, Vec<_>) = calls.iter().partition(|(step, _)| kind(step) == removed);
            let rest = time(model.device(), &without.iter().map(|(_, call)| call.clone()).collect::<Vec<_>>())?;
            let (n, bytes) = (with.len(), with.iter().map(|(step, _)| step.launch.bytes).sum::<u64>());
            let kernel = with[0].0.kernel.symbol.to_string_lossy();
            table.row(context, positions.len(), "in_step", &kernel, n, (all - rest) / n as f64, bytes / n as u64)?;
        }
        Ok(())
    }

    /// The median of a graph's replays, in microseconds.
    fn time(device: &Device, calls: &[Call]) -> Result<f64> {
        let graph = device.graph(calls, true)?;
        let (start, end) = (device.event(true)?, device.event(true)?);
        let sample = |replays: usize| -> Result<f64> {
            start.record()?;
            for _ in 0..replays {
                graph.launch()?;
            }
            end.record()?;
            end.wait("a timed graph")?;
            Ok(end.elapsed_us(&start)? / replays as f64)
        };
        // The first warms up, and says how long one takes.
        sample(1)?;
        let replays = ((SAMPLE_US / sample(1)?) as usize).clamp(1, REPLAYS);
        let mut samples = (0..SAMPLES).map(|_| sample(replays)).collect::<Result<Vec<_>>>()?;
        samples.sort_by(f64::total_cmp);
        Ok(samples[samples.len() / 2])
    }

    /// The decode loop as an engine runs it, the host one step behind; and with as many steps queued as there may be, so that
    /// the host is never late. The difference is what the device idles between two steps.
    fn decode(model: &mut GpuModel, table: &mut Table, context: usize, rows: &[(SequenceId, u32)]) -> Result<()> {
        let params = SamplingParams::default();
        let vocab = model.plan().limits().vocab_tokens;
        let start = SampleStart::new(&params, 7, [&[], &[]], &[], vocab, 0)?;
        let rows: Vec<_> = rows.iter().map(|&(id, token)| (id, token, &start)).collect();
        model.begin_decode(&rows)?;
        let read = |model: &mut GpuModel| -> Result<()> {
            for record in model.read_step()?.ok_or("a step is on its way")? {
                record.sampled(&params, 0)?;
            }
            Ok(())
        };
        // Microseconds of each of `steps` steps while `ahead` more are queued.
        let mut timed = |ahead: usize, steps: usize| -> Result<f64> {
            while model.unread_steps() < ahead {
                model.continue_decode()?;
            }
            while model.unread_steps() > ahead {
                read(model)?;
            }
            let start = Instant::now();
            for _ in 0..steps {
                model.continue_decode()?;
                read(model)?;
            }
            Ok(start.elapsed().as_secs_f64() * 1e6 / steps as f64)
        };
        timed(1, WARM_UP)?;
        // The context grows meanwhile; both have the same in the mean.
        let before = timed(1, TOKENS / 2)?;
        let busy = timed(TOKEN_RING - 1, TOKENS)?;
        let us = before.midpoint(timed(1, TOKENS / 2)?);
        while model.read_step()?.is_some() {}
        let (steps, calls) = split(model.calls(&vec![context as u32 - 1; rows.len()], Ending::Token)?);
        let totals = Totals::of(&steps);
        table.row(context, rows.len(), "end_to_end", "all", totals.kernels, us, totals.bytes)?;
        // With parameters and logits that the loop left.
        let (sampler, call) = (steps.last().ok_or("a step without kernels")?, calls.last().ok_or("no launch")?);
        let alone = time(model.device(), &vec![call.clone(); SAMPLERS])? / SAMPLERS as f64;
        let kernel = sampler.kernel.symbol.to_string_lossy();
        table.row(context, rows.len(), "kernel", &kernel, 1, alone, sampler.launch.bytes)?;
        table.row(context, rows.len(), "host_gap", "all", 0, us - busy, 0)
    }
}
