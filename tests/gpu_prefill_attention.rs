//! The kernels `prefill_kv` and `prefill_attention` against the CPU's reference. They need a GPU, so `cargo test` counts
//! these as ignored; `make test-gpu` runs them.

#![cfg(feature = "cuda")]
#![allow(clippy::single_range_in_vec_init, reason = "the new positions of one sequence")]

mod cpu_support;
mod kernel_support;

use std::ops::Range;

use cpu_support::{Random, affordable, configs};
use flint_rs::{
    cancel::Cancel,
    cpu::{
        Precision, Rope,
        reference::{Cache, attention, qk_norm_rope},
    },
    gpu::Buffer,
    kernels::{PREFILL_KV, PrefillAttention, PrefillAttentionArgs, PrefillKvArgs, PrefillTile, prefill_kv_launch},
    kv::{BLOCK_POSITIONS, PoolLayout},
};
use half::bf16;
use kernel_support::{Gpu, POISON, key_bound, output};
use rayon::prelude::*;

const HEAD_DIM: usize = 128;
const GROUP: usize = 8;
const EPS: f32 = 1e-6;
/// The pool has this many layers, and the tests run in the last; the others must stay as they are.
const LAYERS: usize = 2;
/// Results of a case that are compared with the reference; of longer ones a random part and all edges.
const COMPARED: usize = 3000;

#[derive(Clone, Copy, Debug)]
struct Shape {
    n_kv_heads: usize,
    window: Option<usize>,
    rope: bool,
    /// Size of the norm weights: how uneven the probabilities are.
    sharpness: f32,
}

const FULL: Shape = Shape { n_kv_heads: 4, window: None, rope: false, sharpness: 1.0 };
const SLIDING: Shape = Shape { window: Some(513), rope: true, ..FULL };

impl Shape {
    fn row_len(self) -> usize {
        (GROUP + 2) * self.n_kv_heads * HEAD_DIM
    }

    fn layout(self) -> PoolLayout {
        PoolLayout { n_layers: LAYERS, n_kv_heads: self.n_kv_heads, head_dim: HEAD_DIM }
    }

    fn first_visible(self, position: usize) -> usize {
        self.window.map_or(0, |window| (position + 1).saturating_sub(window))
    }
}

/// One sequence: its new tokens, and what it sees before them.
struct Sequence {
    new: Range<usize>,
    /// From the first position of the first visible block to the last new one.
    cached: Range<usize>,
    /// `[new, row_len]`, as projected.
    qkv: Vec<f32>,
    /// `[G][cached, head_dim]`.
    k: Vec<Vec<f32>>,
    v: Vec<Vec<f32>>,
}

/// Weights and sequences, and where the device has them.
struct Case {
    shape: Shape,
    rope: Rope,
    q_norm: Vec<f32>,
    k_norm: Vec<f32>,
    sinks: Vec<f32>,
    sequences: Vec<Sequence>,
    table_stride: usize,
    tables: Vec<u32>,
    /// Before the new tokens: NaN where nothing is cached.
    pool: Vec<u8>,
    n_blocks: usize,
}

impl Case {
    fn random(random: &mut Random, shape: Shape, new: &[Range<usize>]) -> Self {
        let config =
            flint_rs::config::FlintConfig { head_dim: HEAD_DIM, rope_theta: 10_000.0, ..configs(false)[0].clone() };
        let rope = Rope::new(&config);
        let weights = |random: &mut Random| -> Vec<f32> {
            (0..HEAD_DIM).map(|_| shape.sharpness.sqrt() * (1.0 + 0.2 * random.normal())).collect()
        };
        let (q_norm, k_norm) = (weights(random), weights(random));
        let sinks = (0..GROUP * shape.n_kv_heads).map(|_| 2.0 * random.normal()).collect();
        let sequences: Vec<_> =
            new.iter().map(|new| Sequence::random(random.bits(), shape, new.clone(), &rope, &k_norm)).collect();

        let n_blocks = 1 + sequences.iter().map(|s| s.blocks().len()).sum::<usize>();
        let mut ids: Vec<u32> = (0..n_blocks as u32).collect();
        for i in (1..n_blocks).rev() {
            ids.swap(i, random.below(i + 1));
        }
        // Entries that nobody may follow lead to a block of NaN.
        let poisoned = ids.pop().unwrap();
        let table_stride = sequences.iter().map(|s| s.blocks().end).max().unwrap() + 3;
        let mut tables = vec![poisoned; sequences.len() * table_stride];
        for (row, sequence) in sequences.iter().enumerate() {
            for index in sequence.blocks() {
                tables[row * table_stride + index] = ids.pop().unwrap();
            }
        }
        let mut case = Self {
            shape,
            rope,
            q_norm,
            k_norm,
            sinks,
            sequences,
            table_stride,
            tables,
            pool: vec![POISON; n_blocks * shape.layout().block_bytes()],
            n_blocks,
        };
        let before: Vec<_> = case.sequences.iter().map(|s| s.cached.start..s.new.start).collect();
        let mut pool = std::mem::take(&mut case.pool);
        case.store(&mut pool, &before);
        case.pool = pool;
        case
    }

    /// Puts K and V of the sequences' `positions` into `pool`.
    fn store(&self, pool: &mut [u8], positions: &[Range<usize>]) {
        let layout = self.shape.layout();
        let mut owners = vec![None; self.n_blocks];
        for (row, sequence) in self.sequences.iter().enumerate() {
            for index in sequence.blocks() {
                owners[self.tables[row * self.table_stride + index] as usize] =
                    Some((sequence, &positions[row], index));
            }
        }
        pool.par_chunks_exact_mut(layout.block_bytes()).zip(owners).for_each(|(block, owner)| {
            let Some((sequence, positions, index)) = owner else { return };
            let layer = &mut block[2 * (LAYERS - 1) * layout.layer_values()..];
            for (i, p) in (index * BLOCK_POSITIONS..(index + 1) * BLOCK_POSITIONS).enumerate() {
                if !positions.contains(&p) {
                    continue;
                }
                for g in 0..self.shape.n_kv_heads {
                    let at = (p - sequence.cached.start) * HEAD_DIM;
                    for d in 0..HEAD_DIM {
                        let k = 2 * ((g * BLOCK_POSITIONS + i) * HEAD_DIM + d);
                        let v = 2 * (((self.shape.n_kv_heads + g) * HEAD_DIM + d) * BLOCK_POSITIONS + i);
                        layer[k..k + 2].copy_from_slice(&bf16::from_f32(sequence.k[g][at + d]).to_le_bytes());
                        layer[v..v + 2].copy_from_slice(&bf16::from_f32(sequence.v[g][at + d]).to_le_bytes());
                    }
                }
            }
        });
    }

    /// Runs the kernels for the tokens at `chunks`, sequence by sequence, on a pool that has all before them. Returns each
    /// token's result, `[T, 8 G, 128]` bf16.
    fn run(
        &self,
        gpu: &Gpu,
        kernel: PrefillAttention,
        pool: &Buffer,
        chunks: &[(usize, Range<usize>)],
        pdl: bool,
    ) -> Vec<u16> {
        let Shape { n_kv_heads, window, rope, .. } = self.shape;
        let (row_len, u32_kv_heads) = (self.shape.row_len(), n_kv_heads as u32);
        let mut inputs = Vec::new();
        for (row, positions) in chunks {
            let sequence = &self.sequences[*row];
            let first = positions.start - sequence.new.start;
            inputs.extend_from_slice(&sequence.qkv[first * row_len..(first + positions.len()) * row_len]);
        }
        let n_rows = inputs.len() / row_len;
        let panel_rows = n_rows.next_multiple_of(8) + 8;
        let tiles = PrefillTile::cut(chunks.iter().map(|(row, p)| (*row as u32, p.start as u32..p.end as u32)));
        let words: Vec<u32> = tiles.iter().flat_map(|tile| tile.words()).collect();
        let u32_window = window.map(|window| window as u32);

        let qkv = gpu.bf16s(&inputs);
        let attn_bytes = 2 * GROUP * n_kv_heads * panel_rows * 64 * 2;
        let attn = gpu.poisoned(attn_bytes);
        let (blocks, tile_buffer) = (gpu.u32s(&self.tables), gpu.u32s(&words));
        let (q_norm, k_norm) = (gpu.f32s(&self.q_norm), gpu.f32s(&self.k_norm));
        let (inv_freq, sinks) = (gpu.f32s(self.rope.inv_freq()), gpu.f32s(&self.sinks));
        let counter = gpu.u32s(&[0]);
        let layout = self.shape.layout();
        let kv = pool.address() + 2 * ((LAYERS - 1) * layout.layer_values()) as u64;
        let (block_stride, table_stride) = (layout.block_values() as u64, self.table_stride as u32);
        let prepare = PrefillKvArgs {
            qkv: qkv.address(),
            kv,
            blocks: blocks.address(),
            tiles: tile_buffer.address(),
            q_norm: q_norm.address(),
            k_norm: k_norm.address(),
            inv_freq: if rope { inv_freq.address() } else { 0 },
            block_stride,
            table_stride,
            eps: EPS,
        };
        let attend = PrefillAttentionArgs {
            qkv: qkv.address(),
            kv,
            blocks: blocks.address(),
            tiles: tile_buffer.address(),
            sinks: sinks.address(),
            attn: attn.address(),
            counter: counter.address(),
            block_stride,
            table_stride,
            panel_rows: panel_rows as u32,
            window: u32_window.unwrap_or(0),
            n_tiles: tiles.len() as u32,
            n_kv_heads: u32_kv_heads,
            reserved: 0,
        };
        // SAFETY: every buffer has the extent that the structs state, and lives until the download.
        unsafe {
            gpu.launch(PREFILL_KV, prefill_kv_launch(u32_kv_heads, &tiles).unwrap(), pdl, &prepare);
            gpu.launch(kernel.kernel(), kernel.launch(u32_kv_heads, u32_window, &tiles).unwrap(), pdl, &attend);
        }
        let panels = output(&attn, attn_bytes);
        assert_eq!(counter.download().unwrap(), [0; 4], "the counter is left at zero");
        let panels: Vec<u16> = panels.as_chunks::<2>().0.iter().map(|&b| u16::from_le_bytes(b)).collect();
        let columns = GROUP * n_kv_heads * HEAD_DIM;
        for row in n_rows..panel_rows {
            let poisoned = (0..columns).all(|column| panels[panel_at(panel_rows, row, column)] == 0xFFFF);
            assert!(poisoned, "row {row} behind the last was written");
        }
        (0..n_rows * columns).map(|i| panels[panel_at(panel_rows, i / columns, i % columns)]).collect()
    }

    /// The reference's result of query head `h` of the token at `position`. It runs in fp32 on the same BF16 q, k, v.
    fn expected(&self, row: usize, position: usize, h: usize) -> Vec<f32> {
        let sequence = &self.sequences[row];
        let inputs = &sequence.qkv[(position - sequence.new.start) * self.shape.row_len()..];
        let table = self.rope.table(position..position + 1);
        let table = self.shape.rope.then_some(&table);
        let q = &inputs[h * HEAD_DIM..][..HEAD_DIM];
        let q = qk_norm_rope(q, 1, &self.q_norm, EPS, table, Precision::Bfloat16);
        let (k, v) = (&sequence.k[h / GROUP], &sequence.v[h / GROUP]);
        let cache = Cache { k, v, first: sequence.cached.start, n_kv_heads: 1, head_dim: HEAD_DIM };
        let (sinks, cancel) = (&self.sinks[h..=h], Cancel::default());
        attention(&q, position, cache, sinks, self.shape.window, Precision::Float32, &cancel).unwrap()
    }

    /// The new keys (within [`key_bound`]) and values (exactly) are in the pool, and nothing else has changed.
    fn check_pool(&self, what: &str, pool: &Buffer) {
        let found = pool.download().unwrap();
        let mut expected = self.pool.clone();
        let new: Vec<_> = self.sequences.iter().map(|s| s.new.clone()).collect();
        self.store(&mut expected, &new);
        if found == expected {
            return;
        }
        let layout = self.shape.layout();
        let (found, expected) = (found.as_chunks::<2>().0, expected.as_chunks::<2>().0);
        for (i, (found, key)) in found.iter().zip(expected).enumerate() {
            if found == key {
                continue;
            }
            let value = i % layout.block_values();
            let in_layer = value.checked_sub((LAYERS - 1) * layout.layer_values());
            let is_k = in_layer.is_some_and(|at| at < layout.layer_values() / 2);
            // In a key, halves of a head are rotated with each other.
            let d = i % HEAD_DIM;
            let partner = expected[i - d + (d + HEAD_DIM / 2) % HEAD_DIM];
            let [found, key, partner] = [*found, *key, partner].map(|value| bf16::from_le_bytes(value).to_f32());
            let bound = key_bound(key, self.shape.rope.then_some(partner));
            assert!(
                is_k && (found - key).abs() <= bound,
                "{what}: value {value} of block {} is {found} for {key} within {bound}",
                i / layout.block_values()
            );
        }
    }
}

impl Sequence {
    fn random(seed: u64, shape: Shape, new: Range<usize>, rope: &Rope, k_norm: &[f32]) -> Self {
        let cached = shape.first_visible(new.start) / BLOCK_POSITIONS * BLOCK_POSITIONS..new.end;
        let row_len = shape.row_len();
        let random_row =
            |part: u64, index: usize, len: usize| Random::seeded(seed ^ (part << 60 | (index as u64) << 3)).bf16s(len);
        let mut qkv: Vec<f32> = new.clone().into_par_iter().flat_map_iter(|p| random_row(1, p, row_len)).collect();
        let width = shape.n_kv_heads * HEAD_DIM;
        // A position too many or too few at either end, or at a border of blocks, shows.
        let is_edge = |p: usize| {
            [new.start, new.end - 1].iter().any(|&token| {
                let start = shape.first_visible(token);
                [start.wrapping_sub(1), start, token, token / 64 * 64].contains(&p)
            })
        };
        for (p, row) in new.clone().zip(qkv.chunks_exact_mut(row_len)) {
            if is_edge(p) {
                for x in &mut row[row_len - width..] {
                    *x = 16.0 + x.abs();
                }
            }
        }
        // [cached][K, V][G, head_dim]
        let rows: Vec<Vec<f32>> = cached
            .clone()
            .into_par_iter()
            .map(|p| {
                if p < new.start {
                    let mut row = random_row(2, p, 2 * width);
                    if is_edge(p) {
                        for x in &mut row[width..] {
                            *x = 16.0 + x.abs();
                        }
                    }
                    return row;
                }
                let row = &qkv[(p - new.start + 1) * row_len - 2 * width..][..2 * width];
                let table = rope.table(p..p + 1);
                let table = shape.rope.then_some(&table);
                let (k, v) = row.split_at(width);
                let mut k = qk_norm_rope(k, shape.n_kv_heads, k_norm, EPS, table, Precision::Bfloat16);
                k.extend_from_slice(v);
                k
            })
            .collect();
        let part = |part: usize| -> Vec<Vec<f32>> {
            let head = |g: usize| (part * shape.n_kv_heads + g) * HEAD_DIM;
            (0..shape.n_kv_heads)
                .map(|g| rows.iter().flat_map(|row| &row[head(g)..][..HEAD_DIM]).copied().collect())
                .collect()
        };
        Self { new, cached, k: part(0), v: part(1), qkv }
    }

    fn blocks(&self) -> Range<usize> {
        self.cached.start / BLOCK_POSITIONS..self.cached.end.div_ceil(BLOCK_POSITIONS)
    }
}

/// `panel_at` of cuda/panel.cuh.
fn panel_at(panel_rows: usize, row: usize, column: usize) -> usize {
    let pair = column % 64 / 2;
    let (part, place) = (pair % 8, 2 * (pair / 8) + column % 2);
    (column / 64 * panel_rows + row) * 64 + (part ^ (row % 8)) * 8 + place
}

/// Which kernels this card has.
fn kernels(gpu: &Gpu) -> Vec<PrefillAttention> {
    let capability = gpu.device.capability();
    let own = PrefillAttention::of(capability, gpu.device.card().unwrap().processors as u32);
    if own == PrefillAttention::Any { vec![own] } else { vec![PrefillAttention::Any, own] }
}

/// By blocks that new tokens see, and tokens.
fn is_affordable(new: &[Range<usize>]) -> bool {
    affordable(new.iter().map(|new| new.end / BLOCK_POSITIONS + new.len() / 4).sum())
}

/// New tokens at `new` of one sequence each, packed: against the reference, and with PDL against without.
///
/// The bound is that of `kernel_support/attention.rs`: probabilities and results rounded to BF16, sums in another order, q or
/// k a step aside; in norm, 2^-7 of the result of a head holds all of it.
fn check(gpu: &Gpu, random: &mut Random, shape: Shape, new: &[Range<usize>]) {
    const BOUND: f64 = 1.0 / 128.0;
    if !is_affordable(new) {
        return;
    }
    let case = Case::random(random, shape, new);
    let all: Vec<_> = new.iter().cloned().enumerate().collect();
    let rows: Vec<(usize, usize)> = all.iter().flat_map(|(row, p)| p.clone().map(|p| (*row, p))).collect();
    let n_heads = GROUP * shape.n_kv_heads;
    let edge = |i: usize| {
        let (row, position) = rows[i];
        position - new[row].start < 2 || new[row].end - position < 3
    };
    let chosen: Vec<(usize, usize)> = (0..rows.len() * n_heads)
        .filter(|i| {
            rows.len() * n_heads <= COMPARED || edge(i / n_heads) || random.below(rows.len() * n_heads) < COMPARED
        })
        .map(|i| (i / n_heads, i % n_heads))
        .collect();
    let expected: Vec<Vec<f32>> =
        chosen.par_iter().map(|&(row, h)| case.expected(rows[row].0, rows[row].1, h)).collect();
    for kernel in kernels(gpu) {
        let what = format!("{kernel:?} {shape:?} {new:?}");
        let pool = gpu.upload(&case.pool);
        let found = case.run(gpu, kernel, &pool, &all, false);
        case.check_pool(&what, &pool);
        let mut worst = 0.0_f64;
        for (&(row, h), expected) in chosen.iter().zip(&expected) {
            let found = &found[(row * n_heads + h) * HEAD_DIM..][..HEAD_DIM];
            let difference: Vec<f32> =
                found.iter().zip(expected).map(|(&a, b)| bf16::from_bits(a).to_f32() - b).collect();
            let (error, size) = (kernel_support::norm(&difference), kernel_support::norm(expected));
            let position = rows[row].1;
            // A NaN fails too.
            assert!(error <= BOUND * size, "{what}, position {position}, head {h}: error {error:e}, size {size:e}");
            worst = worst.max(error / size);
        }
        println!("{what}: worst error {worst:.1e} of {} results", chosen.len());
        assert!(found == case.run(gpu, kernel, &gpu.upload(&case.pool), &all, true), "{what}: PDL changes bits");
    }
}

/// The new tokens of one sequence in one chunk against the same in chunks that end at `cuts`, and beside other sequences.
fn check_chunks(gpu: &Gpu, random: &mut Random, shape: Shape, new: Range<usize>, cuts: &[&[usize]]) {
    if !is_affordable(std::slice::from_ref(&new)) {
        return;
    }
    let case = Case::random(random, shape, &[new.clone(), 100..117, 3..40]);
    for kernel in kernels(gpu) {
        let what = format!("{kernel:?} {shape:?} {new:?}");
        let whole = case.run(gpu, kernel, &gpu.upload(&case.pool), &[(0, new.clone())], false);
        let columns = whole.len() / new.len();
        for cuts in cuts {
            let pool = gpu.upload(&case.pool);
            let (mut start, mut found) = (new.start, Vec::new());
            for &end in cuts.iter().chain([&new.end]) {
                found.extend(case.run(gpu, kernel, &pool, &[(0, start..end)], false));
                start = end;
            }
            assert!(found == whole, "{what}: {cuts:?} changes bits");
        }
        let others = [(1, case.sequences[1].new.clone()), (0, new.clone()), (2, case.sequences[2].new.clone())];
        let found = case.run(gpu, kernel, &gpu.upload(&case.pool), &others, false);
        assert!(found[17 * columns..][..whole.len()] == whole, "{what}: others change bits");
    }
}

#[test]
#[ignore = "needs a CUDA GPU: make test-gpu"]
fn one_sequence() {
    let (gpu, mut random) = (Gpu::open(), Random::fresh());
    for shape in [FULL, SLIDING, Shape { sharpness: 3.0, ..FULL }] {
        // Around the borders of tiles (16), blocks (64), steps (128) and the window.
        for new in [0..1, 0..16, 0..65, 63..64, 15..130, 64..128, 500..520, 511..512, 512..513, 513..514, 639..642] {
            check(&gpu, &mut random, shape, &[new]);
        }
        check(&gpu, &mut random, shape, &[0..1100]);
        check(&gpu, &mut random, shape, &[777..1999]);
    }
    // Windows of one position, and of few that lie in up to three blocks.
    for window in [1, 2, 65, 66, 129] {
        check(&gpu, &mut random, Shape { window: Some(window), n_kv_heads: 1, ..SLIDING }, &[0..300]);
        check(&gpu, &mut random, Shape { window: Some(window), n_kv_heads: 1, ..SLIDING }, &[1023..1100]);
    }
}

#[test]
#[ignore = "needs a CUDA GPU: make test-gpu"]
fn several_sequences() {
    let (gpu, mut random) = (Gpu::open(), Random::fresh());
    let short: Vec<_> = (0..16).map(|i| 0..20 + 13 * i).collect();
    for shape in [FULL, SLIDING, Shape { n_kv_heads: 3, ..SLIDING }] {
        check(&gpu, &mut random, shape, &[63..193, 0..5, 1000..1001, 17..350, 64..128]);
        check(&gpu, &mut random, shape, &short);
    }
}

#[test]
#[ignore = "needs a CUDA GPU: make test-gpu"]
fn long_contexts() {
    let (gpu, mut random) = (Gpu::open(), Random::fresh());
    let one_head = Shape { n_kv_heads: 1, ..FULL };
    check(&gpu, &mut random, one_head, &[100_000..100_001]);
    check(&gpu, &mut random, Shape { sharpness: 3.0, ..one_head }, &[100_000..102_048, 5..70]);
    check(&gpu, &mut random, SLIDING, &[100_000..102_048, 262_143..262_144]);
}

#[test]
#[ignore = "needs a CUDA GPU: make test-gpu"]
fn chunk_borders_change_no_bit() {
    let (gpu, mut random) = (Gpu::open(), Random::fresh());
    let cuts: &[&[usize]] = &[&[1, 2, 3, 700], &[64, 128, 640], &[33, 100, 101, 513, 514, 1025, 1299], &[7]];
    for shape in [FULL, SLIDING, Shape { sharpness: 3.0, ..FULL }] {
        check_chunks(&gpu, &mut random, shape, 0..1300, cuts);
        check_chunks(&gpu, &mut random, shape, 4090..4200, &[&[4096], &[4091, 4105, 4106, 4160], &[4199]]);
    }
}
