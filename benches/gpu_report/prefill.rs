//! Whole prompts, and the kernels of their last chunk.

use std::{collections::BTreeMap, io::Write, time::Instant};

use flint_rs::{
    cancel::Cancel,
    config::Attention,
    gpu::{Call, GpuModel},
    plan::{Bases, H200_BYTES_PER_SECOND, H200_FLOPS, Operation, Part, Step, Totals},
};

use super::report::Result;

/// Runs that are timed, of which the median counts; of a long prompt one.
const SAMPLES: usize = 3;
const LONG: usize = 50_000;

/// Writes rows of one run.
pub struct Table {
    out: Box<dyn Write>,
    fixed: String,
}

impl Table {
    /// With `fixed` in front of every row: date, card, driver, format, layers.
    pub fn new(mut out: Box<dyn Write>, fixed: String) -> Result<Self> {
        let columns = "tokens,chunk,measure,kernel,launches,us,tokens_s,mb,gb_s,share,tflop,tflop_s,flop_share";
        writeln!(out, "date,card,driver,format,layers,{columns}")?;
        Ok(Self { out, fixed })
    }

    fn row(&mut self, [tokens, chunk]: [usize; 2], [measure, kernel]: [&str; 2], us: f64, work: Work) -> Result<()> {
        let (bytes, flops, seconds) = (work.totals.bytes as f64, work.flops as f64, us * 1e-6);
        writeln!(
            self.out,
            "{},{tokens},{chunk},{measure},{kernel},{},{us:.1},{:.0},{:.1},{:.0},{:.3},{:.4},{:.1},{:.3}",
            self.fixed,
            work.totals.kernels,
            work.tokens as f64 / seconds,
            bytes / 1e6,
            bytes / seconds / 1e9,
            bytes / seconds / H200_BYTES_PER_SECOND,
            flops / 1e12,
            flops / seconds / 1e12,
            flops / seconds / H200_FLOPS,
        )?;
        Ok(self.out.flush()?)
    }
}

/// What launches have to do.
#[derive(Clone, Copy, Default)]
struct Work {
    tokens: usize,
    totals: Totals,
    flops: u64,
}

impl Work {
    fn of(model: &GpuModel, steps: &[Step], part: Part) -> Self {
        let flops = steps.iter().map(|step| model.plan().chunk_flops(step, &[part])).sum();
        Self { tokens: part.tokens, totals: Totals::of(steps), flops }
    }

    fn add(self, other: Self) -> Self {
        let totals = Totals {
            kernels: self.totals.kernels + other.totals.kernels,
            bytes: self.totals.bytes + other.totals.bytes,
        };
        Self { tokens: self.tokens + other.tokens, totals, flops: self.flops + other.flops }
    }
}

/// A prompt of so many random tokens.
pub fn measure(model: &mut GpuModel, table: &mut Table, tokens: usize) -> Result<()> {
    let vocab = model.config().vocab_size as u64;
    let mut state = tokens as u64;
    let prompt: Vec<u32> = (0..tokens)
        .map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            ((state >> 33) % vocab) as u32
        })
        .collect();
    let mut times = Vec::new();
    let samples = if tokens < LONG { SAMPLES } else { 1 };
    for sample in 0..=samples {
        let id = model.add_sequence()?;
        let start = Instant::now();
        // The first warms up; of a long prompt, with a chunk.
        let n = if sample == 0 { tokens.min(model.plan().chunk().tokens) } else { tokens };
        model.prefill(id, &prompt[..n], &mut |_, _| {}, &Cancel::default())?;
        if sample > 0 {
            times.push(start.elapsed().as_secs_f64() * 1e6);
        }
        // Its row of the block tables stays as it is, for the kernels alone.
        model.remove_sequence(id);
    }
    times.sort_by(f64::total_cmp);

    let chunk = model.plan().chunk().tokens;
    let part = |first: usize| Part { slot: 0, first, tokens: chunk.min(tokens - first) };
    let work = (0..tokens).step_by(chunk).map(part).map(|part| {
        let steps: Vec<Step> = model.plan().chunk_steps(&Bases::default(), &[part], false);
        Work::of(model, &steps, part)
    });
    let work = work.fold(Work::default(), Work::add);
    table.row([tokens, chunk], ["prefill", "all"], times[times.len() / 2], work)?;
    kernels(model, table, tokens, part((tokens - 1) / chunk * chunk))
}

/// Microseconds of one kernel of each kind in a prompt's last chunk, as part of a chain of all of its kind.
fn kernels(model: &GpuModel, table: &mut Table, tokens: usize, part: Part) -> Result<()> {
    let mut groups: BTreeMap<(Operation, bool), Vec<(Step, Call)>> = BTreeMap::new();
    for (step, call) in model.chunk_calls(&[part], false)? {
        // Attention over a window and over everything differ.
        let layer = model.config().layers.get(step.layer);
        let full = step.operation == Operation::Attention && layer.is_some_and(|l| l.attention == Attention::Full);
        groups.entry((step.operation, full)).or_default().push((step, call));
    }
    for ((operation, full), calls) in groups {
        let (steps, calls): (Vec<Step>, Vec<Call>) = calls.into_iter().unzip();
        let graph = model.device().graph(&calls, true)?;
        let (start, end) = (model.device().event(true)?, model.device().event(true)?);
        let mut samples = Vec::new();
        for sample in 0..=SAMPLES {
            start.record()?;
            graph.launch()?;
            end.record()?;
            end.wait("a timed graph")?;
            // The first warms up.
            if sample > 0 {
                samples.push(end.elapsed_us(&start)?);
            }
        }
        samples.sort_by(f64::total_cmp);
        let n = steps.len();
        let work = Work::of(model, &steps, part);
        // A kernel's own share of its kind.
        let totals = Totals { kernels: n, bytes: work.totals.bytes / n as u64 };
        let one = Work { totals, flops: work.flops / n as u64, ..work };
        let window = if operation == Operation::Attention && !full { ":window" } else { "" };
        let name = format!("{operation:?}:{}{window}", steps[0].kernel.symbol.to_string_lossy());
        table.row([tokens, part.tokens], ["kernel", &name], samples[samples.len() / 2] / n as f64, one)?;
    }
    Ok(())
}
