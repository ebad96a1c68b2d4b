//! Attention of a block of tokens over the cache. A task takes query rows of one KV head, several tokens and all their heads, so
//! that keys and values are expanded once for all of them.

use super::{
    Engine,
    parallel::{self, Disjoint},
    simd::{Panel, TILE_COLS, TILE_ROWS, Tile},
};
use crate::{
    cancel::Cancel,
    config::FlintConfig,
    cpu::{Precision, kv::LayerKv},
    error::Result,
};

/// Query rows of a task. Their scores over a window of 512 fit the second-level cache.
const TASK_ROWS: usize = 128;
/// Most bytes of scores that a thread holds; long contexts take fewer rows a task.
const SCORE_BYTES: usize = 16 << 20;
/// Positions of values that are expanded together.
const VALUE_ROWS: usize = 64;

/// What [`Engine::attention`] computes, beside its queries.
pub(super) struct Args<'a> {
    pub(super) config: &'a FlintConfig,
    pub(super) kv: &'a LayerKv,
    pub(super) sinks: &'a [f32],
    pub(super) window: Option<usize>,
    /// Position of the first token.
    pub(super) start: usize,
    pub(super) precision: Precision,
}

/// f32 values that a thread holds for a task.
pub(super) fn workspace_values(config: &FlintConfig) -> usize {
    let scores = (SCORE_BYTES / 4).min(TASK_ROWS * config.context_length.next_multiple_of(TILE_COLS));
    let width = config.head_dim.next_multiple_of(TILE_COLS);
    scores.max(config.context_length.next_multiple_of(TILE_COLS)) + (2 * TASK_ROWS + VALUE_ROWS + 3 * TILE_COLS) * width
}

/// Query rows of one KV head: `n_heads` heads of each token.
struct Task {
    kv_head: usize,
    first_token: usize,
    n_tokens: usize,
    first_head: usize,
    n_heads: usize,
}

impl Task {
    fn n_rows(&self) -> usize {
        self.n_tokens * self.n_heads
    }

    /// Token and head of a row.
    fn row(&self, row: usize) -> (usize, usize) {
        (self.first_token + row / self.n_heads, self.first_head + row % self.n_heads)
    }
}

impl Args<'_> {
    /// The first position that token `t` sees.
    fn lowest(&self, t: usize) -> usize {
        self.window.map_or(0, |window| (self.start + t + 1).saturating_sub(window))
    }

    fn tasks(&self, n_tokens: usize) -> Vec<Task> {
        let (n_heads, n_kv_heads) = (self.config.n_heads, self.config.n_kv_heads);
        let group = n_heads / n_kv_heads;
        let positions = self.start + n_tokens - self.lowest(0);
        let rows = (SCORE_BYTES / (positions.next_multiple_of(TILE_COLS) * 4)).clamp(1, TASK_ROWS);
        // One token may need its heads split so that every thread has work; else tokens give enough tasks.
        let wanted = if n_tokens == 1 { rayon::current_num_threads().div_ceil(n_kv_heads) } else { 1 };
        let heads = group.div_ceil(wanted).min(rows);
        let tokens = (rows / heads).max(1);
        let mut tasks = Vec::new();
        for first_token in (0..n_tokens).step_by(tokens) {
            for head in (0..n_heads).step_by(group) {
                tasks.extend((0..group).step_by(heads).map(|first| Task {
                    kv_head: head / group,
                    first_token,
                    n_tokens: tokens.min(n_tokens - first_token),
                    first_head: head + first,
                    n_heads: heads.min(group - first),
                }));
            }
        }
        tasks
    }
}

impl Engine {
    /// [`crate::cpu::reference::attention`] of `q`, `[T, H, head_dim]`.
    pub(super) fn attention(&self, q: &[f32], args: &Args<'_>, cancel: &Cancel) -> Result<Vec<f32>> {
        let token_len = args.config.n_heads * args.config.head_dim;
        let mut out = vec![0.0; q.len()];
        let tasks = args.tasks(q.len() / token_len);
        let view = Disjoint::new(&mut out);
        parallel::for_each(tasks.len(), cancel, || (), |(), task| self.attention_task(q, args, &tasks[task], &view))?;
        Ok(out)
    }

    fn attention_task(&self, q: &[f32], args: &Args<'_>, task: &Task, out: &Disjoint<'_>) {
        let head_dim = args.config.head_dim;
        let at = |row: usize| {
            let (token, head) = task.row(row);
            let start = (token * args.config.n_heads + head) * head_dim;
            start..start + head_dim
        };
        // Positions that some row sees; each row of `scores` holds them all.
        let lowest = args.lowest(task.first_token);
        let n = args.start + task.first_token + task.n_tokens - lowest;
        let stride = n.next_multiple_of(TILE_COLS);
        let mut scores = self.scores(args, task, lowest, n, |row| &q[at(row)]);
        for (row, scores) in scores.chunks_exact_mut(stride).enumerate() {
            let (token, head) = task.row(row);
            let visible = args.lowest(token) - lowest..args.start + token + 1 - lowest;
            scores[..visible.start].fill(0.0);
            scores[visible.end..].fill(0.0);
            let scale = 1.0 / (head_dim as f32).sqrt();
            self.isa.softmax(&mut scores[visible], scale, args.sinks[head], args.precision);
        }
        let sums = self.weighted_values(args, task, lowest, n, &scores);
        for (row, sums) in sums.chunks_exact(head_dim.next_multiple_of(TILE_COLS)).enumerate() {
            // SAFETY: each task has its own heads and tokens.
            let out = unsafe { out.slice(at(row)) };
            for (out, sum) in out.iter_mut().zip(sums) {
                *out = args.precision.round(*sum);
            }
        }
    }

    /// q . k for each row of `task` and each of `n` positions from `lowest` on: `[rows, n rounded up to 16]`.
    fn scores<'a>(
        &self,
        args: &Args<'_>,
        task: &Task,
        lowest: usize,
        n: usize,
        q: impl Fn(usize) -> &'a [f32],
    ) -> Vec<f32> {
        let (head_dim, n_rows) = (args.config.head_dim, task.n_rows());
        let stride = n.next_multiple_of(TILE_COLS);
        let mut packed = vec![0.0; n_rows.next_multiple_of(TILE_ROWS) * head_dim];
        for row in 0..n_rows {
            let tile = &mut packed[row / TILE_ROWS * TILE_ROWS * head_dim..];
            for (k, x) in q(row).iter().enumerate() {
                tile[k * TILE_ROWS + row % TILE_ROWS] = *x;
            }
        }
        let mut scores = vec![0.0; n_rows * stride];
        let (mut rows, mut panel) = (vec![0.0; TILE_COLS * head_dim], vec![0.0; TILE_COLS * head_dim]);
        for first in (0..n).step_by(TILE_COLS) {
            for (i, out) in rows.chunks_exact_mut(head_dim).enumerate().take(n - first) {
                self.expand(&args.kv.k, lowest + first + i - args.kv.first(), task.kv_head, out);
            }
            self.isa.transpose(&rows, &mut panel);
            for (tile, values) in packed.chunks_exact(TILE_ROWS * head_dim).enumerate() {
                let rows = (n_rows - tile * TILE_ROWS).min(TILE_ROWS);
                let a = Tile { values, rows, row_stride: 1, k: head_dim, k_stride: TILE_ROWS };
                let c = &mut scores[tile * TILE_ROWS * stride + first..];
                self.isa.tile(a, Panel { values: &panel, k_stride: TILE_COLS }, c, stride);
            }
        }
        scores
    }

    /// The sum of probability times value: `[rows, head_dim rounded up to 16]`.
    fn weighted_values(
        &self,
        args: &Args<'_>,
        task: &Task,
        lowest: usize,
        n: usize,
        probabilities: &[f32],
    ) -> Vec<f32> {
        let (head_dim, n_rows) = (args.config.head_dim, task.n_rows());
        let (stride, width) = (n.next_multiple_of(TILE_COLS), head_dim.next_multiple_of(TILE_COLS));
        let mut sums = vec![0.0; n_rows * width];
        let mut values = vec![0.0; VALUE_ROWS * width];
        for first in (0..n).step_by(VALUE_ROWS) {
            let k = VALUE_ROWS.min(n - first);
            for (i, out) in values.chunks_exact_mut(width).enumerate().take(k) {
                self.expand(&args.kv.v, lowest + first + i - args.kv.first(), task.kv_head, &mut out[..head_dim]);
            }
            for tile in (0..n_rows).step_by(TILE_ROWS) {
                let rows = (n_rows - tile).min(TILE_ROWS);
                let a =
                    Tile { values: &probabilities[tile * stride + first..], rows, row_stride: stride, k, k_stride: 1 };
                for column in (0..width).step_by(TILE_COLS) {
                    let b = Panel { values: &values[column..], k_stride: width };
                    self.isa.tile(a, b, &mut sums[tile * width + column..], width);
                }
            }
        }
        sums
    }

    fn expand(&self, store: &crate::cpu::kv::Store, row: usize, kv_head: usize, out: &mut [f32]) {
        let columns = kv_head * out.len()..(kv_head + 1) * out.len();
        self.isa.decode(store.dtype, store.part(row, columns), out);
    }
}
