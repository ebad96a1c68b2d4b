//! Attention over a block KV cache against the CPU's reference: the fast kernels and the general ones take the same cases.

use std::ops::Range;

use flint_rs::{
    cancel::Cancel,
    config::FlintConfig,
    cpu::{
        Precision, Rope,
        reference::{Cache, attention, qk_norm_rope},
    },
    gpu::Buffer,
    kernels::{
        DecodeAttentionArgs, GENERAL_ATTENTION, GENERAL_QKV_FINISH, GeneralAttentionArgs, GeneralQkvFinishArgs, Kernel,
        Launch, PREFILL_KV, PrefillKvArgs, PrefillTile,
        decode::{DECODE_EMBED, DecodeEmbedArgs, decode_embed_launch},
        decode_attention_few_launch, decode_attention_many_launch, decode_attention_partial_bytes, prefill_kv_launch,
    },
    kv::{BLOCK_POSITIONS, PoolLayout},
};
use half::bf16;
use rayon::prelude::*;

use super::{Gpu, key_bound, output, to_bf16s};
use crate::cpu_support::{Random, affordable, configs};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Path {
    /// As in steps of few rows.
    Few,
    /// As in steps of many.
    Many,
    General,
}

#[derive(Clone, Copy, Debug)]
pub struct Shape {
    pub n_heads: usize,
    pub n_kv_heads: usize,
    pub head_dim: usize,
    pub window: Option<usize>,
    pub rope: bool,
    /// Size of the norm weights: how uneven the probabilities are.
    pub sharpness: f32,
}

const EPS: f32 = 1e-6;
/// The pool has this many layers, and the test runs in the last; the others must stay as they are.
const LAYERS: usize = 2;
/// Pools up to this size are compared byte for byte after the launch.
const COMPARED_BYTES: usize = 64 << 20;

/// What one sequence has cached before its new token.
struct Sequence {
    position: usize,
    /// From the first position of the first visible block to the new one, which is not cached yet.
    cached: Range<usize>,
    /// `[G][positions, head_dim]`; [`check`] appends the new position's.
    k: Vec<Vec<f32>>,
    v: Vec<Vec<f32>>,
}

impl Sequence {
    fn random(seed: u64, shape: Shape, position: usize) -> Self {
        let start = shape.window.map_or(0, |window| (position + 1).saturating_sub(window));
        let cached = start / BLOCK_POSITIONS * BLOCK_POSITIONS..position;
        let part = |part: u64| {
            (0..shape.n_kv_heads as u64)
                .map(|g| {
                    (cached.clone())
                        .into_par_iter()
                        .flat_map_iter(|p| {
                            let mut random = Random::seeded(seed ^ (part << 60 | g << 40 | p as u64) << 3);
                            random.bf16s(shape.head_dim)
                        })
                        .collect::<Vec<f32>>()
                })
                .collect::<Vec<_>>()
        };
        let (k, mut v) = (part(0), part(1));
        // A position too many or too few at either end, or at a border of blocks, shows.
        let edges = [
            start.wrapping_sub(1),
            start,
            position.wrapping_sub(1),
            position / 64 * 64,
            (position / 64 * 64).wrapping_sub(1),
        ];
        for edge in edges.into_iter().filter(|edge| cached.contains(edge)) {
            for v in &mut v {
                for x in &mut v[(edge - cached.start) * shape.head_dim..][..shape.head_dim] {
                    *x = bf16::from_f32(16.0 + x.abs()).to_f32();
                }
            }
        }
        Self { position, cached, k, v }
    }

    fn blocks(&self) -> Range<usize> {
        self.cached.start / BLOCK_POSITIONS..self.position / BLOCK_POSITIONS + 1
    }
}

/// Everything that a launch reads and writes.
struct Step {
    shape: Shape,
    /// The kernels give the bits of the reference.
    exact: bool,
    layout: PoolLayout,
    positions: Vec<u32>,
    table_stride: usize,
    qkv: Vec<f32>,
    blocks: Buffer,
    position_buffer: Buffer,
    q_norm: Buffer,
    k_norm: Buffer,
    inv_freq: Option<Buffer>,
    /// Cosines and sines of the positions.
    rope: Option<Buffer>,
    sinks: Buffer,
    partial: Buffer,
    counters: Buffer,
}

/// Runs `path` on sequences at `positions`: against the reference, alone against together, with PDL against without.
///
/// The general kernels give the bits of the reference.
///
/// The bound of the others. The reference runs in fp32 on the same BF16 q, k, v. The kernel rounds each probability to BF16
/// (2^-9 relative) and the result (2^-9), and adds in another order (below 2^-14 for scores of tens). q or k may come out a BF16 step aside
/// where the sum of squares rounds differently, which moves scores by up to 3e-3. The values that are averaged have random
/// signs, and so have these errors: in norm, 2^-7 of the result of a head holds them all, while one position too many or
/// too few moves it by at least a percent. A head of a few dims averages over too few errors for that, and gets twice as much.
pub fn check(gpu: &Gpu, random: &mut Random, path: Path, shape: Shape, positions: &[usize]) {
    let Shape { n_heads, n_kv_heads, head_dim, .. } = shape;
    let blocks = |&p: &usize| shape.window.map_or(p, |window| p.min(window)) / BLOCK_POSITIONS + 1;
    if !affordable(positions.iter().map(blocks).sum()) {
        return;
    }
    let bound = if head_dim < 16 { 2.0 } else { 1.0 } / 128.0;
    let exact = path == Path::General;
    let precision = if exact { Precision::Bfloat16 } else { Precision::Float32 };
    let config = FlintConfig { head_dim, rope_theta: 10_000.0, ..configs(false)[0].clone() };
    let rope = Rope::new(&config);
    let scale = |random: &mut Random| -> Vec<f32> {
        (0..head_dim).map(|_| shape.sharpness.sqrt() * (1.0 + 0.2 * random.normal())).collect()
    };
    let (q_norm, k_norm) = (scale(random), scale(random));
    let sinks: Vec<f32> = (0..n_heads).map(|_| 2.0 * random.normal()).collect();
    let row_len = (n_heads + 2 * n_kv_heads) * head_dim;
    let qkv = random.bf16s(positions.len() * row_len);
    let mut sequences: Vec<_> = positions.iter().map(|&p| Sequence::random(random.bits(), shape, p)).collect();

    // New keys and values by the reference, and attention over all.
    let mut expected = vec![0.0; positions.len() * n_heads * head_dim];
    let mut new_k = Vec::new();
    for (sequence, row) in sequences.iter_mut().zip(qkv.chunks_exact(row_len)) {
        let table = rope.table(sequence.position..sequence.position + 1);
        let table = shape.rope.then_some(&table);
        let (k, v) = row[n_heads * head_dim..].split_at(n_kv_heads * head_dim);
        let k = qk_norm_rope(k, n_kv_heads, &k_norm, EPS, table, Precision::Bfloat16);
        for g in 0..n_kv_heads {
            sequence.k[g].extend(&k[g * head_dim..][..head_dim]);
            sequence.v[g].extend(&v[g * head_dim..][..head_dim]);
        }
        new_k.push(k);
    }
    expected.par_chunks_exact_mut(head_dim).enumerate().for_each(|(i, out)| {
        let (row, h) = (i / n_heads, i % n_heads);
        let g = h / (n_heads / n_kv_heads);
        let (sequence, inputs) = (&sequences[row], &qkv[row * row_len..][..row_len]);
        let table = rope.table(sequence.position..sequence.position + 1);
        let table = shape.rope.then_some(&table);
        let q = qk_norm_rope(&inputs[h * head_dim..][..head_dim], 1, &q_norm, EPS, table, Precision::Bfloat16);
        let (k, v) = (&sequence.k[g], &sequence.v[g]);
        let cache = Cache { k, v, first: sequence.cached.start, n_kv_heads: 1, head_dim };
        let (sinks, cancel) = (&sinks[h..=h], Cancel::default());
        let result = attention(&q, sequence.position, cache, sinks, shape.window, precision, &cancel);
        out.copy_from_slice(&result.unwrap());
    });

    let (pool, tables, table_stride) = device_blocks(random, shape, &sequences);
    let layout = PoolLayout { n_layers: LAYERS, n_kv_heads, head_dim };
    let u32_positions: Vec<u32> = positions.iter().map(|&p| p as u32).collect();
    let step = Step {
        shape,
        exact,
        layout,
        table_stride,
        blocks: gpu.u32s(&tables),
        position_buffer: gpu.u32s(&u32_positions),
        positions: u32_positions,
        q_norm: gpu.f32s(&q_norm),
        k_norm: gpu.f32s(&k_norm),
        inv_freq: shape.rope.then(|| gpu.f32s(rope.inv_freq())),
        rope: shape.rope.then(|| gpu.f32s(&angles(rope.inv_freq(), positions))),
        sinks: gpu.f32s(&sinks),
        partial: gpu.poisoned(decode_attention_partial_bytes(positions.len(), n_kv_heads)),
        counters: gpu.upload(&vec![0; positions.len() * n_heads * 4]),
        qkv,
    };
    let pool_buffer = gpu.upload(&pool);

    let what = format!("{path:?} {shape:?}");
    let together = step.run(gpu, path, &pool_buffer, 0..positions.len(), false, 0);
    let found = to_bf16s(&together);
    let mut worst = 0.0_f64;
    for (i, (found, expected)) in found.chunks_exact(head_dim).zip(expected.chunks_exact(head_dim)).enumerate() {
        let difference: Vec<f32> = found.iter().zip(expected).map(|(a, b)| a - b).collect();
        let (error, size) = (super::norm(&difference), super::norm(expected));
        let (position, head) = (positions[i / n_heads], i % n_heads);
        // A NaN fails too.
        assert!(error <= bound * size, "{what}, position {position}, head {head}: error {error:e}, size {size:e}");
        let same = || found.iter().map(|x| x.to_bits()).eq(expected.iter().map(|x| x.to_bits()));
        assert!(!exact || same(), "{what}, position {position}, head {head}: other bits, error {error:e}");
        worst = worst.max(error / size);
    }
    println!("{what}, {positions:?}: worst error {worst:.1e} of the result");

    step.check_pool(&what, &pool, &pool_buffer, &sequences, &new_k, &tables);
    assert!(step.counters.download().unwrap().iter().all(|&byte| byte == 0), "{what}: counters are left at zero");
    assert!(together == step.run(gpu, path, &pool_buffer, 0..positions.len(), true, 0), "{what}: PDL changes bits");
    if path != Path::General {
        // In panels, with rows behind the last that stay as they were.
        let panel_rows = positions.len().next_multiple_of(8) + 8;
        let panels = step.run(gpu, path, &pool_buffer, 0..positions.len(), false, panel_rows);
        let expected = in_panels(&together, n_heads * head_dim, panel_rows);
        assert!(panels == expected, "{what}: panels hold something else");
    }
    let row_bytes = together.len() / positions.len();
    for row in 0..positions.len() {
        let alone = step.run(gpu, path, &pool_buffer, row..row + 1, false, 0);
        assert!(alone == together[row * row_bytes..][..row_bytes], "{what}: row {row} depends on the others");
    }
}

/// The keys and values that decode, in both forms, and prefill make of the same projections are the same to the bit.
pub fn check_keys(gpu: &Gpu, random: &mut Random, shape: Shape, positions: &[u32]) {
    const HIDDEN: usize = 2048;
    let Shape { n_heads, n_kv_heads, head_dim, .. } = shape;
    let (rows, kv_heads) = (positions.len(), n_kv_heads as u32);
    let layout = PoolLayout { n_layers: 1, n_kv_heads, head_dim };
    let config = FlintConfig { head_dim, rope_theta: 10_000.0, ..configs(false)[0].clone() };
    let inv_freq = gpu.f32s(Rope::new(&config).inv_freq());
    let qkv_values = random.bf16s(rows * (n_heads + 2 * n_kv_heads) * head_dim);
    let [q_norm, k_norm] = [(); 2].map(|()| gpu.f32s(&random.normals(head_dim)));
    let sinks = gpu.f32s(&random.normals(n_heads));
    // Each row has one block, which every position of it leads to. A window of one position reads no other.
    let table_stride = *positions.iter().max().unwrap() as usize / BLOCK_POSITIONS + 1;
    let tables: Vec<u32> = (0..rows).flat_map(|row| vec![row as u32; table_stride]).collect();
    let (blocks, position_buffer) = (gpu.u32s(&tables), gpu.u32s(positions));
    let (eps, block_stride, table_stride) = (EPS, layout.block_values() as u64, table_stride as u32);

    let (embedding, tokens) = (gpu.bf16s(&random.bf16s(HIDDEN)), gpu.u32s(&vec![0; rows]));
    let [delta, residual] = [(); 2].map(|()| gpu.poisoned(rows * HIDDEN * 2));
    let angles = gpu.poisoned(rows * head_dim * 4);
    let embed = DecodeEmbedArgs {
        embedding: embedding.address(),
        tokens: tokens.address(),
        positions: position_buffer.address(),
        inv_freq: inv_freq.address(),
        delta: delta.address(),
        residual: residual.address(),
        rope: angles.address(),
    };
    // SAFETY: every buffer has the extent that the struct states, and lives until the downloads.
    unsafe { gpu.launch(DECODE_EMBED, decode_embed_launch(rows), false, &embed) };

    let pool_bytes = rows * layout.block_bytes();
    let decoded = |path: Path| {
        let (pool, qkv) = (gpu.poisoned(pool_bytes), gpu.bf16s(&qkv_values));
        let attn = gpu.poisoned(rows * n_heads * head_dim * 2);
        let args = DecodeAttentionArgs {
            qkv: qkv.address(),
            kv: pool.address(),
            blocks: blocks.address(),
            positions: position_buffer.address(),
            q_norm: q_norm.address(),
            k_norm: k_norm.address(),
            rope: if shape.rope { angles.address() } else { 0 },
            sinks: sinks.address(),
            attn: attn.address(),
            partial: 0,
            counters: 0,
            block_stride,
            table_stride,
            window: 1,
            eps,
            rows: rows as u32,
            kv_heads,
            panel_rows: 0,
        };
        let (kernel, launch) = decode_launch(gpu, path, kv_heads, Some(1), positions);
        // SAFETY: as above.
        unsafe { gpu.launch(kernel, launch, false, &args) };
        output(&pool, pool_bytes)
    };
    let (pool, qkv) = (gpu.poisoned(pool_bytes), gpu.bf16s(&qkv_values));
    let tiles = PrefillTile::cut(positions.iter().enumerate().map(|(row, &at)| (row as u32, at..at + 1)));
    let words = gpu.u32s(&tiles.iter().flat_map(|tile| tile.words()).collect::<Vec<_>>());
    let args = PrefillKvArgs {
        qkv: qkv.address(),
        kv: pool.address(),
        blocks: blocks.address(),
        tiles: words.address(),
        q_norm: q_norm.address(),
        k_norm: k_norm.address(),
        inv_freq: if shape.rope { inv_freq.address() } else { 0 },
        block_stride,
        table_stride,
        eps,
    };
    // SAFETY: as above.
    unsafe { gpu.launch(PREFILL_KV, prefill_kv_launch(kv_heads, &tiles).unwrap(), false, &args) };
    let prefilled = output(&pool, pool_bytes);
    let written = prefilled.chunks_exact(2).filter(|value| **value != [super::POISON; 2]).count();
    assert_eq!(written, rows * 2 * n_kv_heads * head_dim, "one key and one value a row and head");
    for path in [Path::Few, Path::Many] {
        assert!(decoded(path) == prefilled, "{path:?} {shape:?}: keys or values differ from prefill's");
    }
}

/// Of a form of decode's attention.
fn decode_launch(gpu: &Gpu, path: Path, kv_heads: u32, window: Option<u32>, positions: &[u32]) -> (Kernel, Launch) {
    match path {
        Path::Few => decode_attention_few_launch(kv_heads, window, positions),
        Path::Many => decode_attention_many_launch(gpu.card(), kv_heads, window, positions),
        Path::General => None,
    }
    .expect("a form of decode, and no more rows than it takes")
}

/// Rows of `cols` bf16 values in the order of `cuda/panel.cuh`, and poison where no row is.
fn in_panels(rows: &[u8], cols: usize, panel_rows: usize) -> Vec<u8> {
    let mut panels = vec![super::POISON; panel_rows * cols * 2];
    for (i, value) in rows.chunks_exact(2).enumerate() {
        let (row, column) = (i / cols, i % cols);
        let pair = column % 64 / 2;
        // 16-byte part p has pairs p, p + 8, p + 16, p + 24, and lies at p ^ (row % 8).
        let (part, place) = ((pair % 8) ^ (row % 8), 2 * (pair / 8) + column % 2);
        let at = 2 * ((column / 64 * panel_rows + row) * 64 + 8 * part + place);
        panels[at..at + 2].copy_from_slice(value);
    }
    panels
}

/// `[positions, 2, head_dim / 2]`: cosines, then sines, as `decode_embed` leaves them.
fn angles(inv_freq: &[f32], positions: &[usize]) -> Vec<f32> {
    let of = |&position: &usize| {
        let angles = inv_freq.iter().map(move |inv_freq| f64::from(position as f32 * inv_freq));
        angles.clone().map(f64::cos).chain(angles.map(f64::sin)).map(|x| x as f32)
    };
    positions.iter().flat_map(of).collect()
}

/// The pool's bytes with every sequence in blocks of random order, everything else being NaN; the block tables, whose
/// entries outside the visible range lead to a block of NaN; and the entries of a table.
fn device_blocks(random: &mut Random, shape: Shape, sequences: &[Sequence]) -> (Vec<u8>, Vec<u32>, usize) {
    let layout = PoolLayout { n_layers: LAYERS, n_kv_heads: shape.n_kv_heads, head_dim: shape.head_dim };
    let n_blocks = 1 + sequences.iter().map(|s| s.blocks().len()).sum::<usize>();
    let mut ids: Vec<u32> = (0..n_blocks as u32).collect();
    for i in (1..n_blocks).rev() {
        ids.swap(i, random.below(i + 1));
    }
    let poison_block = ids.pop().unwrap();
    let table_stride = sequences.iter().map(|s| s.blocks().end).max().unwrap() + 3;
    let mut tables = vec![poison_block; sequences.len() * table_stride];
    let mut owners = vec![None; n_blocks];
    for (row, sequence) in sequences.iter().enumerate() {
        for index in sequence.blocks() {
            let id = ids.pop().unwrap();
            tables[row * table_stride + index] = id;
            owners[id as usize] = Some((sequence, index));
        }
    }
    let mut pool = vec![super::POISON; n_blocks * layout.block_bytes()];
    pool.par_chunks_exact_mut(layout.block_bytes()).zip(owners).for_each(|(block, owner)| {
        let Some((sequence, index)) = owner else { return };
        let layer = &mut block[2 * (LAYERS - 1) * layout.layer_values()..];
        for (i, p) in (index * BLOCK_POSITIONS..(index + 1) * BLOCK_POSITIONS).enumerate() {
            if !sequence.cached.contains(&p) {
                continue;
            }
            for g in 0..shape.n_kv_heads {
                let at = (p - sequence.cached.start) * shape.head_dim;
                for d in 0..shape.head_dim {
                    let (k, v) = value_offsets(layout, g, i, d);
                    layer[k..k + 2].copy_from_slice(&bf16::from_f32(sequence.k[g][at + d]).to_le_bytes());
                    layer[v..v + 2].copy_from_slice(&bf16::from_f32(sequence.v[g][at + d]).to_le_bytes());
                }
            }
        }
    });
    (pool, tables, table_stride)
}

/// Bytes from the start of a layer of a block to dim `d` of head `g` at its position `i`, in K and in V.
fn value_offsets(layout: PoolLayout, g: usize, i: usize, d: usize) -> (usize, usize) {
    let k = (g * BLOCK_POSITIONS + i) * layout.head_dim + d;
    let v = ((layout.n_kv_heads + g) * layout.head_dim + d) * BLOCK_POSITIONS + i;
    (2 * k, 2 * v)
}

impl Step {
    /// Attention of `rows`, bf16 bytes; in panels of `panel_rows` if that is not 0.
    fn run(&self, gpu: &Gpu, path: Path, pool: &Buffer, rows: Range<usize>, pdl: bool, panel_rows: usize) -> Vec<u8> {
        let Shape { n_heads, n_kv_heads, head_dim, window, .. } = self.shape;
        let row_len = (n_heads + 2 * n_kv_heads) * head_dim;
        let qkv = gpu.bf16s(&self.qkv[rows.start * row_len..rows.end * row_len]);
        let attn_bytes = rows.len().max(panel_rows) * n_heads * head_dim * 2;
        let attn = gpu.poisoned(attn_bytes);
        let kv = pool.address() + 2 * ((LAYERS - 1) * self.layout.layer_values()) as u64;
        let blocks = self.blocks.address() + 4 * (rows.start * self.table_stride) as u64;
        let positions = self.position_buffer.address() + 4 * rows.start as u64;
        let inv_freq = self.inv_freq.as_ref().map_or(0, Buffer::address);
        let (block_stride, table_stride) = (self.layout.block_values() as u64, self.table_stride as u32);
        let u32_window = window.map(|window| window as u32);
        match path {
            Path::Few | Path::Many => {
                assert_eq!((head_dim, n_heads), (128, 8 * n_kv_heads));
                let args = DecodeAttentionArgs {
                    qkv: qkv.address(),
                    kv,
                    blocks,
                    positions,
                    q_norm: self.q_norm.address(),
                    k_norm: self.k_norm.address(),
                    rope: self.rope.as_ref().map_or(0, |rope| rope.address() + 512 * rows.start as u64),
                    sinks: self.sinks.address(),
                    attn: attn.address(),
                    partial: if window.is_none() { self.partial.address() } else { 0 },
                    counters: if window.is_none() { self.counters.address() } else { 0 },
                    block_stride,
                    table_stride,
                    window: u32_window.unwrap_or(0),
                    eps: EPS,
                    rows: rows.len() as u32,
                    kv_heads: n_kv_heads as u32,
                    panel_rows: panel_rows as u32,
                };
                let (kernel, launch) =
                    decode_launch(gpu, path, n_kv_heads as u32, u32_window, &self.positions[rows.clone()]);
                // SAFETY: every buffer has the extent that the struct states, and lives until the download.
                unsafe { gpu.launch(kernel, launch, pdl, &args) };
            }
            Path::General => {
                let finish = GeneralQkvFinishArgs {
                    qkv: qkv.address(),
                    kv,
                    blocks,
                    positions,
                    q_norm: self.q_norm.address(),
                    k_norm: self.k_norm.address(),
                    inv_freq,
                    slots: 0,
                    block_stride,
                    table_stride,
                    n_heads: n_heads as u32,
                    n_kv_heads: n_kv_heads as u32,
                    head_dim: head_dim as u32,
                    eps: EPS,
                    reserved: 0,
                };
                let attention = GeneralAttentionArgs {
                    qkv: qkv.address(),
                    kv,
                    blocks,
                    positions,
                    sinks: self.sinks.address(),
                    attn: attn.address(),
                    slots: 0,
                    block_stride,
                    table_stride,
                    window: u32_window.unwrap_or(0),
                    n_heads: n_heads as u32,
                    n_kv_heads: n_kv_heads as u32,
                    head_dim: head_dim as u32,
                    scale: 1.0 / (head_dim as f32).sqrt(),
                };
                // SAFETY: as above.
                unsafe {
                    gpu.launch(GENERAL_QKV_FINISH, finish.launch(rows.len() as u32), pdl, &finish);
                    gpu.launch(GENERAL_ATTENTION, attention.launch(&self.positions[rows]), pdl, &attention);
                }
            }
        }
        output(&attn, attn_bytes)
    }

    /// The new keys (within [`key_bound`], unless the kernels are exact) and values are in the cache, and nothing else has
    /// changed.
    fn check_pool(
        &self,
        what: &str,
        before: &[u8],
        pool: &Buffer,
        sequences: &[Sequence],
        new_k: &[Vec<f32>],
        tables: &[u32],
    ) {
        let Shape { n_heads, n_kv_heads, head_dim, .. } = self.shape;
        if before.len() > COMPARED_BYTES {
            return;
        }
        let mut after = pool.download().unwrap();
        let row_len = (n_heads + 2 * n_kv_heads) * head_dim;
        for (row, sequence) in sequences.iter().enumerate() {
            let block = tables[row * self.table_stride + sequence.position / BLOCK_POSITIONS] as usize;
            let layer = block * self.layout.block_bytes() + 2 * (LAYERS - 1) * self.layout.layer_values();
            let new_v = &self.qkv[row * row_len + (n_heads + n_kv_heads) * head_dim..];
            for (i, (&key, new_v)) in new_k[row].iter().zip(new_v).enumerate() {
                let (g, d) = (i / head_dim, i % head_dim);
                let partner = new_k[row][g * head_dim + (d + head_dim / 2) % head_dim];
                let bound = if self.exact { 0.0 } else { key_bound(key, self.shape.rope.then_some(partner)) };
                let (k, v) = value_offsets(self.layout, g, sequence.position % BLOCK_POSITIONS, d);
                let (k, v) = (layer + k, layer + v);
                let found = to_bf16s(&after[k..k + 2])[0];
                assert!((found - key).abs() <= bound, "{what}: k {found} for {key} within {bound}");
                assert_eq!(after[v..v + 2], bf16::from_f32(*new_v).to_le_bytes(), "{what}: v {new_v}");
                for at in [k, v] {
                    after[at..at + 2].copy_from_slice(&before[at..at + 2]);
                }
            }
        }
        assert!(after == before, "{what}: something else in the cache was written");
    }
}
