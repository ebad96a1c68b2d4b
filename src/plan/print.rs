//! A plan as text, for `flint-rs plan`.

use std::fmt;

use super::{Bases, CHUNK_TOKENS, Card, Ending, Operation, Part, Path, Plan, Step, chunk};

/// What an H200 was measured to read, in bytes a second.
pub const H200_BYTES_PER_SECOND: f64 = 4.55e12;
/// What its tensor cores were measured to do with BF16, in operations a second.
pub const H200_FLOPS: f64 = 790e12;

impl fmt::Display for Path {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Fast(format) => write!(f, "fast, {} tiles", format!("{format:?}").to_uppercase()),
            Self::General { because } => write!(f, "general, because {because}"),
        }
    }
}

impl fmt::Display for Card {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ways = match self.major {
            ..9 => "mma.sync, no clusters, no dependent launches",
            9 => "wgmma, clusters, dependent launches",
            _ => "mma.sync, clusters, dependent launches",
        };
        write!(f, "{} multiprocessors of compute capability {}.x: {ways}", self.processors, self.major)
    }
}

/// Sums over the launches of a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// Launches.
    pub kernels: usize,
    /// Bytes that they have to move.
    pub bytes: u64,
}

impl Totals {
    /// Of `steps`.
    pub fn of<'a>(steps: impl IntoIterator<Item = &'a Step>) -> Self {
        let add = |sum: Self, step: &Step| Self { kernels: sum.kernels + 1, bytes: sum.bytes + step.launch.bytes };
        steps.into_iter().fold(Self::default(), add)
    }

    /// Microseconds that moving the bytes takes at least, at so many bytes a second.
    pub fn floor_us(&self, bytes_per_second: f64) -> f64 {
        self.bytes as f64 / bytes_per_second * 1e6
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let gb = |bytes: usize| format!("{:.2} GB", bytes as f64 / 1e9);
        let (memory, limits, pools) = (self.memory(), self.limits, self.pools);
        writeln!(f, "card       {}", self.card)?;
        writeln!(f, "path       {}", self.path)?;
        writeln!(
            f,
            "memory     {}: weights {}, KV cache {} ({} x {} tokens), workspace {}",
            gb(memory.total_bytes()),
            gb(memory.weights_bytes),
            gb(memory.kv_bytes),
            limits.sequences,
            limits.context_tokens,
            gb(memory.workspace_bytes),
        )?;
        writeln!(
            f,
            "KV pools   full {} blocks of {} B for {} layers, sliding {} blocks of {} B for {} layers",
            pools.full_blocks,
            pools.full.block_bytes(),
            pools.full.n_layers,
            pools.window_blocks,
            pools.window.block_bytes(),
            pools.window.n_layers,
        )?;
        write!(f, "chunk      {} tokens of prompts at a time", self.chunk.tokens)?;
        match chunk::choices(self.card, CHUNK_TOKENS)[0] {
            suits if self.chunk.tokens < suits && matches!(self.path, Path::Fast(_)) => {
                writeln!(f, ", where {suits} would suit {} multiprocessors", self.card.processors)?;
            }
            _ => writeln!(f)?,
        }
        let last = (limits.context_tokens - 1) as u32;
        let mut cases = vec![(1, last.min(1023)), (1, last), (limits.sequences, last)];
        cases.dedup();
        for (rows, position) in cases {
            self.write_step(f, rows, position)?;
        }
        let tokens = self.chunk.tokens.min(limits.context_tokens);
        let mut starts = vec![0, limits.context_tokens - tokens];
        starts.dedup();
        starts.into_iter().try_for_each(|first| self.write_chunk(f, Part { slot: 0, first, tokens }))
    }
}

impl Plan {
    fn write_step(&self, f: &mut fmt::Formatter<'_>, rows: usize, position: u32) -> fmt::Result {
        let steps = self.steps(&Bases::default(), &vec![position; rows], Ending::Token);
        let totals = Totals::of(&steps);
        writeln!(
            f,
            "\nstep of {rows} at position {position}: {} kernels, {:.1} MB, at least {:.0} us on an H200 ({:.2} TB/s)",
            totals.kernels,
            totals.bytes as f64 / 1e6,
            totals.floor_us(H200_BYTES_PER_SECOND),
            H200_BYTES_PER_SECOND / 1e12,
        )?;
        write_kernels(f, &steps, None)
    }

    fn write_chunk(&self, f: &mut fmt::Formatter<'_>, part: Part) -> fmt::Result {
        let steps = self.chunk_steps(&Bases::default(), &[part], false);
        let flops = |step: &Step| self.chunk_flops(step, &[part]);
        let (totals, all) = (Totals::of(&steps), steps.iter().map(flops).sum::<u64>() as f64);
        writeln!(
            f,
            "\nchunk of {} at position {}: {} kernels, {:.1} MB, {:.3} TFLOP, at least {:.2} ms on an H200 ({:.0} TFLOP/s)",
            part.tokens,
            part.first,
            totals.kernels,
            totals.bytes as f64 / 1e6,
            all / 1e12,
            totals.floor_us(H200_BYTES_PER_SECOND).max(all / H200_FLOPS * 1e6) / 1e3,
            H200_FLOPS / 1e12,
        )?;
        write_kernels(f, &steps, Some(&flops))
    }
}

/// A line for each kernel of a list of steps; with `flops` also its operations.
fn write_kernels(f: &mut fmt::Formatter<'_>, steps: &[Step], flops: Option<&dyn Fn(&Step) -> u64>) -> fmt::Result {
    write!(f, "  {:<28} {:>8} {:>14} {:>6} {:>8} {:>9}", "kernel", "launches", "grid", "block", "shared", "MB")?;
    writeln!(f, "{}", if flops.is_some() { "     GFLOP" } else { "" })?;
    let mut groups: Vec<(Operation, &Step, Totals, u64)> = Vec::new();
    for step in steps {
        let same = |(operation, first, ..): &&mut (Operation, &Step, Totals, u64)| {
            (*operation, first.kernel, first.launch.grid, first.launch.block)
                == (step.operation, step.kernel, step.launch.grid, step.launch.block)
        };
        let (totals, operations) = (Totals::of([step]), flops.map_or(0, |flops| flops(step)));
        match groups.iter_mut().find(same) {
            Some((_, _, sum, all)) => {
                sum.kernels += totals.kernels;
                sum.bytes += totals.bytes;
                *all += operations;
            }
            None => groups.push((step.operation, step, totals, operations)),
        }
    }
    for (_, step, totals, operations) in groups {
        let [x, y, z] = step.launch.grid;
        write!(
            f,
            "  {:<28} {:>8} {:>14} {:>6} {:>8} {:>9.2}",
            step.kernel.symbol.to_string_lossy(),
            totals.kernels,
            format!("{x}x{y}x{z}"),
            step.launch.block,
            step.launch.shared_bytes,
            totals.bytes as f64 / 1e6,
        )?;
        match flops {
            Some(_) => writeln!(f, " {:>9.1}", operations as f64 / 1e9)?,
            None => writeln!(f)?,
        }
    }
    Ok(())
}
