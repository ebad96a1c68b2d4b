//! Products over many rows and the routing around them against the CPU's reference, at Flint's own dimensions. They need
//! a GPU, so `cargo test` counts these as ignored; `make test-gpu` runs them.

#![cfg(feature = "cuda")]
#![allow(clippy::float_cmp, reason = "equal means the same bits")]

mod cpu_support;
mod kernel_support;

use cpu_support::{Kind, Random, affordable, matrix};
use flint_rs::{
    cancel::Cancel,
    cpu::{
        Precision::{Bfloat16, Float32},
        reference::{Routes, project, silu, swiglu_act},
    },
    gpu::Buffer,
    kernels::{
        PrefillNormArgs,
        decode::{CHOSEN, EXPERT_WIDTH, EXPERTS, HIDDEN, SHARED_WIDTH},
        prefill::*,
        prefill_norm_launch,
    },
    tiles::TileFormat,
    weights::SwiGlu,
};
use kernel_support::{
    Gpu, assert_close, bf16_bytes, bf16_step, output, packed::Packed, rms, to_bf16s, to_f32s, to_u32s,
};

const FORMATS: [(Kind, TileFormat); 2] = [(Kind::Nvfp4, TileFormat::Nvfp4), (Kind::Bf16, TileFormat::Bf16)];

fn products(gpu: &Gpu) -> Products {
    Products::of(gpu.device.capability().0, gpu.device.card().unwrap().processors)
}

/// The ways of a product that this card has.
fn ways(gpu: &Gpu, product: &Product) -> Vec<Way> {
    let hopper = gpu.device.capability().0 == 9;
    product.ways().iter().copied().filter(|&way| hopper || way == Way::AnyCard).collect()
}

/// Where an input of a row lies in panels, in values, as `cuda/panel.cuh` has it.
fn panel_at(panel_rows: usize, row: usize, column: usize) -> usize {
    let pair = column % PANEL / 2;
    let (part, place) = (pair % 8, 2 * (pair / 8) + column % 2);
    (column / PANEL * panel_rows + row) * PANEL + (part ^ (row % 8)) * 8 + place
}

/// Panels of `x`; rows behind the last are NaN.
fn panels(x: &[f32], cols: usize) -> Vec<f32> {
    let rows = x.len() / cols;
    let panel_rows = rows.next_multiple_of(ROWS_STEP);
    let mut panels = vec![f32::NAN; panel_rows * cols];
    for (i, &x) in x.iter().enumerate() {
        panels[panel_at(panel_rows, i / cols, i % cols)] = x;
    }
    panels
}

/// Rows `rows` of bf16 panels.
fn from_panels(bytes: &[u8], panel_rows: usize, cols: usize, rows: impl Iterator<Item = usize>) -> Vec<f32> {
    let values = to_bf16s(bytes);
    rows.flat_map(|row| (0..cols).map(move |column| (row, column)))
        .map(|(row, column)| values[panel_at(panel_rows, row, column)])
        .collect()
}

#[derive(Clone, Copy, PartialEq)]
enum Out {
    Bf16,
    F32,
    Panels,
}

/// A product with its weights on the device.
struct Case<'a> {
    gpu: &'a Gpu,
    product: &'static Product,
    format: TileFormat,
    out: Out,
    /// Outputs of a row.
    width: usize,
    /// Inputs of a row.
    cols: usize,
    strips: usize,
    weights: Buffer,
    scales: Buffer,
}

impl Case<'_> {
    /// The rows that come out for the rows of `x`, as f32.
    fn run(&self, way: Way, x: &[f32], pdl: bool) -> Vec<f32> {
        let rows = x.len() / self.cols;
        let panel_rows = rows.next_multiple_of(ROWS_STEP);
        let x = self.gpu.upload(&bf16_bytes(&panels(x, self.cols)));
        let out_rows = if self.out == Out::Panels { panel_rows } else { rows };
        let len = out_rows * self.width * if self.out == Out::F32 { 4 } else { 2 };
        let out = self.gpu.poisoned(len);
        let args = PrefillLinearArgs {
            x: x.address(),
            weights: self.weights.address(),
            scales: self.scales.address(),
            out: out.address(),
            rows: rows as u32,
            panel_rows: panel_rows as u32,
            strips: self.strips as u32,
            k_tiles: (self.cols / 512) as u32,
            out_stride: if self.out == Out::Panels { panel_rows } else { self.width } as u32,
            scale: f32::NAN,
        };
        let (kernel, launch) = products(self.gpu).linear_launch(self.product, self.format, way, &args);
        // SAFETY: every buffer has the extent that the struct states, and lives until the download in `output`.
        unsafe { self.gpu.launch(kernel, launch, pdl, &args) };
        let bytes = output(&out, len);
        match self.out {
            Out::Bf16 => to_bf16s(&bytes),
            Out::F32 => to_f32s(&bytes),
            Out::Panels => {
                let padding = from_panels(&bytes, panel_rows, self.width, rows..panel_rows);
                assert!(padding.iter().all(|x| x.is_nan()), "rows that no token owns were written");
                from_panels(&bytes, panel_rows, self.width, 0..rows)
            }
        }
    }

    /// `exact` are the unrounded results. All ways, and a row wherever it stands, give the same bits.
    fn check(&self, x: &[f32], exact: &[f32], spread_bound: f32) {
        let rows = x.len() / self.cols;
        let ways = ways(self.gpu, self.product);
        let found = self.run(ways[0], x, false);
        let spread = rms(exact);
        let rounded = if self.out == Out::F32 { 0.0 } else { 0.51 };
        assert_close("product", &found, exact, |i| spread_bound * spread + rounded * bf16_step(exact[i]));
        for way in ways {
            assert!(self.run(way, x, true) == found, "{way:?}, {rows} rows: other bits");
            for row in [0, rows / 2, rows - 1] {
                let alone = self.run(way, &x[row * self.cols..][..self.cols], true);
                assert!(alone == found[row * self.width..][..self.width], "{way:?}: row {row} of {rows} alone");
            }
            let turned = [&x[self.cols..], &x[..self.cols]].concat();
            let expected = [&found[self.width..], &found[..self.width]].concat();
            assert!(self.run(way, &turned, false) == expected, "{way:?}, {rows} rows: depends on the place");
        }
    }
}

const ROWS: [usize; 8] = [1, 8, 9, 63, 64, 65, 127, 1000];

/// Sums of exact products in another order, and the tensor cores' own rounding of sums.
const SPREAD: f32 = 2e-5;

fn plain(product: &'static Product, out: Out, width: usize, cols: usize, rows_of: &[usize]) {
    let (gpu, mut random) = (Gpu::open(), Random::fresh());
    for (kind, format) in FORMATS {
        let weights = matrix(&mut random, kind, width, cols);
        let packed = Packed::plain(format, &[&weights]);
        let case = Case {
            gpu: &gpu,
            product,
            format,
            out,
            width,
            cols,
            strips: width / 16,
            weights: gpu.upload(&packed.tiles),
            scales: gpu.f32s(&packed.scales),
        };
        for &rows in rows_of.iter().filter(|&&rows| affordable(2 * rows)) {
            let x = random.bf16s(rows * cols);
            case.check(&x, &project(&weights, &x, Float32, &Cancel::default()).unwrap(), SPREAD);
        }
    }
}

#[test]
#[ignore = "needs a CUDA GPU: make test-gpu"]
fn rows_of_bf16() {
    plain(&PREFILL_LINEAR, Out::Bf16, 640, 2048, &ROWS);
    // Strips that no unit divides, the longest and the shortest k.
    plain(&PREFILL_LINEAR, Out::Bf16, 16 * 21, 6144, &[65, 300]);
    plain(&PREFILL_LINEAR, Out::Bf16, 16 * 5, 512, &[17, 300]);
}

#[test]
#[ignore = "needs a CUDA GPU: make test-gpu"]
fn rows_of_f32() {
    plain(&PREFILL_LOGITS, Out::F32, 16 * 153, 2048, &[1, 64, 300]);
    // The parts of a router.
    plain(&PREFILL_LOGITS, Out::F32, 3 * EXPERTS, HIDDEN, &[9, 300]);
}

#[test]
#[ignore = "needs a CUDA GPU: make test-gpu"]
fn activations() {
    let (gpu, mut random) = (Gpu::open(), Random::fresh());
    for (kind, format) in FORMATS {
        let [gate, up] = [(); 2].map(|()| matrix(&mut random, kind, 384, HIDDEN));
        let packed = Packed::gate_up(format, &gate, &up);
        let case = Case {
            gpu: &gpu,
            product: &PREFILL_SWIGLU,
            format,
            out: Out::Panels,
            width: 384,
            cols: HIDDEN,
            strips: 48,
            weights: gpu.upload(&packed.tiles),
            scales: gpu.f32s(&packed.scales),
        };
        for rows in ROWS.into_iter().filter(|&rows| affordable(2 * rows)) {
            let x = random.bf16s(rows * HIDDEN);
            let [gate, up] = [&gate, &up].map(|m| project(m, &x, Float32, &Cancel::default()).unwrap());
            let exact: Vec<f32> = gate.iter().zip(&up).map(|(&g, &u)| silu(g) * u).collect();
            case.check(&x, &exact, SPREAD);
        }
    }
}

/// Different experts: the 256 are these in turn, so that a test makes and packs few.
const DISTINCT: usize = 12;

struct Moe {
    experts: Vec<SwiGlu>,
    gate_up: [Buffer; 2],
    down: [Buffer; 2],
    shared: SwiGlu,
    shared_gate_up: [Buffer; 2],
    shared_down: Buffer,
    shared_scale: f32,
}

impl Moe {
    fn new(gpu: &Gpu, random: &mut Random, kind: Kind, format: TileFormat) -> Self {
        let expert = |random: &mut Random, width: usize| SwiGlu {
            gate: matrix(random, kind, width, HIDDEN),
            up: matrix(random, kind, width, HIDDEN),
            down: matrix(random, kind, HIDDEN, width),
        };
        let experts: Vec<SwiGlu> = (0..DISTINCT).map(|_| expert(random, EXPERT_WIDTH)).collect();
        let shared = expert(random, SHARED_WIDTH);
        let all = |parts: Vec<Packed>, scales: usize| {
            let turns = || (0..EXPERTS).map(|e| &parts[e % DISTINCT]);
            let tiles: Vec<u8> = turns().flat_map(|p| p.tiles.iter().copied()).collect();
            let scales: Vec<f32> = turns().flat_map(|p| p.scales[..scales].iter().copied()).collect();
            [gpu.upload(&tiles), gpu.f32s(&scales)]
        };
        let gate_up = all(experts.iter().map(|e| Packed::gate_up(format, &e.gate, &e.up)).collect(), 2);
        let down = all(experts.iter().map(|e| Packed::plain(format, &[&e.down])).collect(), 1);
        let [shared_up, shared_down] =
            [Packed::gate_up(format, &shared.gate, &shared.up), Packed::plain(format, &[&shared.down])];
        Self {
            experts,
            gate_up,
            down,
            shared,
            shared_gate_up: [gpu.upload(&shared_up.tiles), gpu.f32s(&shared_up.scales)],
            shared_down: gpu.upload(&shared_down.tiles),
            shared_scale: shared_down.scales[0],
        }
    }
}

/// What the kernels of a MoE layer left, in the order of tokens and slots.
#[derive(PartialEq)]
struct Outcome {
    chosen: Vec<u32>,
    weights: Vec<f32>,
    act: Vec<f32>,
    y: Vec<f32>,
    act_shared: Vec<f32>,
    y_shared: Vec<f32>,
    delta: Vec<f32>,
}

/// `[T, 3, 256]`: parts of at most 8 bits that add up to the logits exactly, in their order.
fn logit_parts(logits: &[f32]) -> Vec<f32> {
    let of_row = |row: &[f32]| {
        let first: Vec<f32> = row.iter().map(|&x| Bfloat16.round(x)).collect();
        let second: Vec<f32> = row.iter().zip(&first).map(|(x, a)| Bfloat16.round(x - a)).collect();
        let third: Vec<f32> = row.iter().zip(&first).zip(&second).map(|((x, a), b)| x - a - b).collect();
        [first, second, third].concat()
    };
    logits.chunks_exact(EXPERTS).flat_map(of_row).collect()
}

/// What the experts' kernels read and write.
struct ExpertBuffers {
    x: Buffer,
    tiles: Buffer,
    n_tiles: Buffer,
    gathered: Buffer,
    act: Buffer,
    y: Buffer,
    act_shared: Buffer,
    y_shared: Buffer,
    counter: Buffer,
}

/// The products of a MoE layer for rows that are in their order, and of its shared expert.
///
/// # Safety
/// `b` has the extents that the structs state for `rows` rows, and lives until the kernels have ended.
unsafe fn run_experts(
    gpu: &Gpu,
    (moe, format): (&Moe, TileFormat),
    way: Way,
    rows: usize,
    b: &ExpertBuffers,
    pdl: bool,
) {
    let panel_rows = rows.next_multiple_of(ROWS_STEP);
    let shared_rows = if way.shares() { rows as u32 } else { 0 };
    let up = PrefillExpertsArgs {
        x: b.gathered.address(),
        weights: moe.gate_up[0].address(),
        scales: moe.gate_up[1].address(),
        out: b.act.address(),
        tiles: b.tiles.address(),
        n_tiles: b.n_tiles.address(),
        sorted_rows: sorted_rows(rows) as u32,
        shared_rows,
        shared_x: b.x.address(),
        shared_weights: moe.shared_gate_up[0].address(),
        shared_scales: moe.shared_gate_up[1].address(),
        shared_out: b.act_shared.address(),
        panel_rows: panel_rows as u32,
        shared_scale: f32::NAN,
        counter: b.counter.address(),
    };
    let down = PrefillExpertsArgs {
        x: b.act.address(),
        weights: moe.down[0].address(),
        scales: moe.down[1].address(),
        out: b.y.address(),
        shared_x: b.act_shared.address(),
        shared_weights: moe.shared_down.address(),
        shared_scales: 0,
        shared_out: b.y_shared.address(),
        shared_scale: moe.shared_scale,
        ..up
    };
    let shared_up = PrefillLinearArgs {
        x: b.x.address(),
        weights: up.shared_weights,
        scales: up.shared_scales,
        out: b.act_shared.address(),
        rows: rows as u32,
        panel_rows: panel_rows as u32,
        strips: 2 * SHARED_WIDTH as u32 / 16,
        k_tiles: HIDDEN as u32 / 512,
        out_stride: panel_rows as u32,
        scale: f32::NAN,
    };
    let shared_down = PrefillLinearArgs {
        x: b.act_shared.address(),
        weights: down.shared_weights,
        scales: 0,
        out: b.y_shared.address(),
        strips: HIDDEN as u32 / 16,
        k_tiles: SHARED_WIDTH as u32 / 512,
        out_stride: HIDDEN as u32,
        scale: moe.shared_scale,
        ..shared_up
    };
    let products = products(gpu);
    let (up_kernel, up_launch) = products.experts(&PREFILL_EXPERTS_UP, format, way, rows);
    let (down_kernel, down_launch) = products.experts(&PREFILL_EXPERTS_DOWN, format, way, rows);
    // SAFETY: the caller's promise.
    unsafe {
        gpu.launch(up_kernel, up_launch, pdl, &up);
        gpu.launch(down_kernel, down_launch, pdl, &down);
        if !way.shares() {
            let (kernel, launch) = products.swiglu(format, &shared_up);
            gpu.launch(kernel, launch, pdl, &shared_up);
            let (kernel, launch) = products.linear(format, &shared_down);
            gpu.launch(kernel, launch, pdl, &shared_down);
        }
    }
}

/// The norm of the next layer in the same kernel gives the bits of `combine`, which has run, and of the norm behind it.
fn check_combine_norm(gpu: &Gpu, residual: &[f32], combine: &PrefillCombineArgs, pdl: bool) {
    let (rows, eps) = (combine.rows as usize, 1e-6);
    let panel_rows = rows.next_multiple_of(8);
    let weight: Vec<f32> = (0..HIDDEN).map(|i| 0.5 + (i % 77) as f32 / 64.0).collect();
    let weight = gpu.f32s(&weight);
    let residuals = [(); 2].map(|()| gpu.upload(&bf16_bytes(residual)));
    let panels_len = panel_rows * HIDDEN * 2;
    let normed = [(); 2].map(|()| gpu.poisoned(panels_len));
    let combine_norm = PrefillCombineNormArgs {
        y: combine.y,
        sorted: combine.sorted,
        weights: combine.weights,
        shared: combine.shared,
        residual: residuals[0].address(),
        norm_weight: weight.address(),
        normed: normed[0].address(),
        rows: rows as u32,
        panel_rows: panel_rows as u32,
        eps,
        reserved: 0,
    };
    let norm = PrefillNormArgs {
        delta: combine.delta,
        residual: residuals[1].address(),
        weight: weight.address(),
        normed: normed[1].address(),
        rows: rows as u32,
        panel_rows: panel_rows as u32,
        eps,
        reserved: 0,
    };
    let (kernel, launch) = prefill_norm_launch(rows);
    // SAFETY: every buffer has the extent that the structs state, and lives until the downloads below.
    unsafe {
        gpu.launch(PREFILL_COMBINE_NORM, prefill_combine_norm_launch(rows), pdl, &combine_norm);
        gpu.launch(kernel, launch, pdl, &norm);
    }
    let [at_once, behind] = residuals.map(|residual| residual.download().unwrap());
    assert!(at_once == behind, "{rows} rows: residual");
    let [at_once, behind] = normed.map(|panels| output(&panels, panels_len));
    assert!(at_once == behind, "{rows} rows: normed");
}

fn run_moe(
    gpu: &Gpu,
    (moe, format): (&Moe, TileFormat),
    way: Way,
    x: &[f32],
    logits: &[f32],
    residual: &[f32],
    pdl: bool,
) -> Outcome {
    let rows = x.len() / HIDDEN;
    let (panel_rows, sorted_rows) = (rows.next_multiple_of(ROWS_STEP), sorted_rows(rows));
    let (masks_len, most_columns) = (rows.div_ceil(32) * EXPERTS * 4, way.columns() as u32);
    let tiles_len = expert_tiles(rows, most_columns) * 16;
    let [choices_len, act_len, y_len, delta_len] =
        [rows * CHOSEN * 4, sorted_rows * EXPERT_WIDTH * 2, sorted_rows * HIDDEN * 2, rows * HIDDEN * 2];
    let (logits, shared) = (gpu.f32s(&logit_parts(logits)), gpu.bf16s(residual));
    let [chosen, weights, sorted] = [(); 3].map(|()| gpu.poisoned(choices_len));
    let [masks, places] = [(); 2].map(|()| gpu.poisoned(masks_len));
    let (act_shared_len, delta) = (panel_rows * SHARED_WIDTH * 2, gpu.poisoned(delta_len));
    let b = ExpertBuffers {
        x: gpu.upload(&bf16_bytes(&panels(x, HIDDEN))),
        tiles: gpu.poisoned(tiles_len),
        n_tiles: gpu.poisoned(4),
        gathered: gpu.poisoned(y_len),
        act: gpu.poisoned(act_len),
        y: gpu.poisoned(y_len),
        act_shared: gpu.poisoned(act_shared_len),
        y_shared: gpu.poisoned(delta_len),
        counter: gpu.upload(&[0; 4]),
    };
    let route = PrefillRouteArgs {
        logits: logits.address(),
        experts: chosen.address(),
        weights: weights.address(),
        masks: masks.address(),
        rows: rows as u32,
        reserved: 0,
    };
    let group = PrefillGroupArgs {
        masks: masks.address(),
        places: places.address(),
        tiles: b.tiles.address(),
        n_tiles: b.n_tiles.address(),
        rows: rows as u32,
        most_columns,
    };
    let gather = PrefillGatherArgs {
        x: b.x.address(),
        experts: chosen.address(),
        masks: masks.address(),
        places: places.address(),
        sorted: sorted.address(),
        out: b.gathered.address(),
        rows: rows as u32,
        panel_rows: panel_rows as u32,
        sorted_rows: sorted_rows as u32,
        reserved: 0,
    };
    let combine = PrefillCombineArgs {
        y: b.y.address(),
        sorted: sorted.address(),
        weights: weights.address(),
        shared: shared.address(),
        delta: delta.address(),
        rows: rows as u32,
        reserved: 0,
    };
    // SAFETY: every buffer has the extent that the structs state, and lives until the downloads below.
    unsafe {
        gpu.launch(PREFILL_ROUTE, prefill_route_launch(rows), pdl, &route);
        gpu.launch(PREFILL_GROUP, prefill_group_launch(rows), pdl, &group);
        // Of few rows both kernels, in turn.
        let (few, launch) = prefill_gather_launch(rows);
        gpu.launch(if pdl { few } else { PREFILL_GATHER }, launch, pdl, &gather);
        run_experts(gpu, (moe, format), way, rows, &b, pdl);
        gpu.launch(PREFILL_COMBINE, prefill_combine_launch(rows), pdl, &combine);
    }
    check_combine_norm(gpu, residual, &combine, pdl);
    output(&masks, masks_len);
    output(&places, masks_len);
    output(&b.gathered, y_len);
    let chosen = to_u32s(&output(&chosen, choices_len));
    let sorted = to_u32s(&output(&sorted, choices_len));
    check_groups(
        &chosen,
        &sorted,
        &to_u32s(&output(&b.tiles, tiles_len)),
        to_u32s(&output(&b.n_tiles, 4))[0],
        most_columns,
    );
    assert_eq!(to_u32s(&b.counter.download().unwrap()), [0]);
    let y = to_bf16s(&output(&b.y, y_len));
    let act_shared = output(&b.act_shared, act_shared_len);
    let padding = from_panels(&act_shared, panel_rows, SHARED_WIDTH, rows..panel_rows);
    assert!(padding.iter().all(|x| x.is_nan()), "rows that no token owns were written");
    Outcome {
        chosen,
        weights: to_f32s(&output(&weights, choices_len)),
        act: from_panels(&output(&b.act, act_len), sorted_rows, EXPERT_WIDTH, sorted.iter().map(|&row| row as usize)),
        y: sorted.iter().flat_map(|&row| &y[row as usize * HIDDEN..][..HIDDEN]).copied().collect(),
        act_shared: from_panels(&act_shared, panel_rows, SHARED_WIDTH, 0..rows),
        y_shared: to_bf16s(&output(&b.y_shared, delta_len)),
        delta: to_bf16s(&output(&delta, delta_len)),
    }
}

/// Rows of an expert ascend and begin at a multiple of eight, and the tiles cover each once.
fn check_groups(chosen: &[u32], sorted: &[u32], tiles: &[u32], n_tiles: u32, most_columns: u32) {
    let mut expected = Vec::new();
    let mut start = 0;
    for expert in 0..EXPERTS as u32 {
        let rows: Vec<u32> = (0..chosen.len()).filter(|&i| chosen[i] == expert).map(|i| sorted[i]).collect();
        let end = start + rows.len() as u32;
        assert!(rows.iter().copied().eq(start..end), "expert {expert}: rows {rows:?}");
        expected.extend((start..end).map(|row| (expert, row)));
        start = end.next_multiple_of(ROWS_STEP as u32);
    }
    let mut covered = Vec::new();
    for tile in tiles.chunks_exact(4).take(n_tiles as usize) {
        let &[expert, row, rows, width] = tile else { unreachable!() };
        assert!(row.is_multiple_of(8) && rows > 0 && rows <= width && width <= most_columns, "{tile:?}");
        covered.extend((row..row + rows).map(|row| (expert, row)));
    }
    assert_eq!(covered, expected);
}

fn check_moe(gpu: &Gpu, random: &mut Random, kind: (Kind, TileFormat), moe: &Moe, logits: &[f32]) {
    // A row reads six experts.
    if !affordable(4 * logits.len() / EXPERTS) {
        return;
    }
    let (rows, cancel) = (logits.len() / EXPERTS, Cancel::default());
    let (x, shared) = (random.bf16s(rows * HIDDEN), random.bf16s(rows * HIDDEN));
    let with = (moe, kind.1);
    let ways = ways(gpu, &PREFILL_EXPERTS_UP);
    let found = run_moe(gpu, with, ways[0], &x, logits, &shared, false);
    for way in ways {
        assert!(run_moe(gpu, with, way, &x, logits, &shared, true) == found, "{way:?}, {rows} rows: other bits");
        for row in [0, rows / 2, rows - 1] {
            let part = |x: &[f32], len: usize| x[row * len..][..len].to_vec();
            let alone =
                run_moe(gpu, with, way, &part(&x, HIDDEN), &part(logits, EXPERTS), &part(&shared, HIDDEN), true);
            assert!(alone.act == part(&found.act, CHOSEN * EXPERT_WIDTH), "{way:?}: act of row {row} of {rows} alone");
            assert!(
                alone.y_shared == part(&found.y_shared, HIDDEN),
                "{way:?}: shared expert of row {row} of {rows} alone"
            );
            assert!(alone.delta == part(&found.delta, HIDDEN), "{way:?}: row {row} of {rows} alone");
        }
    }
    let routes = Routes::from_logits(logits, EXPERTS, CHOSEN);
    let check = |expert: &SwiGlu, x: &[f32], act: &[f32], y: &[f32]| {
        let exact = swiglu_act(expert, x, Float32, &cancel).unwrap();
        let spread = rms(&exact);
        assert_close("act", act, &exact, |i| SPREAD * spread + 0.51 * bf16_step(exact[i]));
        // From the kernel's own activations, so that their rounding is not counted twice.
        let exact = project(&expert.down, act, Float32, &cancel).unwrap();
        let spread = rms(&exact);
        assert_close("y", y, &exact, |i| SPREAD * spread + 0.51 * bf16_step(exact[i]));
    };
    // The reference is slow: not all of many rows.
    for row in (0..rows).step_by(rows.div_ceil(40)) {
        let x = &x[row * HIDDEN..][..HIDDEN];
        let act_shared = &found.act_shared[row * SHARED_WIDTH..][..SHARED_WIDTH];
        check(&moe.shared, x, act_shared, &found.y_shared[row * HIDDEN..][..HIDDEN]);
        let mut chosen: Vec<(usize, f32)> = routes.of(row).collect();
        chosen.sort_unstable_by_key(|&(e, _)| e);
        let mut routed = vec![0f32; HIDDEN];
        for (slot, &(e, weight)) in chosen.iter().enumerate() {
            let at = row * CHOSEN + slot;
            assert_eq!(found.chosen[at] as usize, e, "row {row}, slot {slot}");
            // An exponential and two divisions of the card.
            assert!((found.weights[at] - weight).abs() <= 1e-6, "row {row}, slot {slot}: {weight}");
            let y = &found.y[at * HIDDEN..][..HIDDEN];
            check(&moe.experts[e % DISTINCT], x, &found.act[at * EXPERT_WIDTH..][..EXPERT_WIDTH], y);
            for (sum, &y) in routed.iter_mut().zip(y) {
                *sum = found.weights[at].mul_add(y, *sum);
            }
        }
        let shared = &shared[row * HIDDEN..][..HIDDEN];
        let delta: Vec<f32> = routed.iter().zip(shared).map(|(&r, s)| Bfloat16.round(Bfloat16.round(r) + s)).collect();
        assert_eq!(found.delta[row * HIDDEN..][..HIDDEN], delta, "row {row}");
    }
}

#[test]
#[ignore = "needs a CUDA GPU: make test-gpu"]
fn moe_layer() {
    let (gpu, mut random) = (Gpu::open(), Random::fresh());
    for kind in FORMATS {
        let moe = Moe::new(&gpu, &mut random, kind.0, kind.1);
        for rows in [1, 8, 9, 63, 65, 256, 1000] {
            let logits = random.normals(rows * EXPERTS);
            check_moe(&gpu, &mut random, kind, &moe, &logits);
        }
    }
}

#[test]
#[ignore = "needs a CUDA GPU: make test-gpu"]
fn uneven_routing() {
    let (gpu, mut random) = (Gpu::open(), Random::fresh());
    let kind = FORMATS[0];
    let moe = Moe::new(&gpu, &mut random, kind.0, kind.1);
    let edge = |rows: usize, f: &dyn Fn(usize, usize) -> f32| {
        (0..rows * EXPERTS).map(|i| f(i / EXPERTS, i % EXPERTS)).collect::<Vec<f32>>()
    };
    for logits in [
        edge(700, &|_, e| if e < 250 { -3.0 } else { 2.0 }), // six take all
        edge(300, &|n, e| if e == 77 { 9.0 } else { ((n * 31 + e * 7) % 101) as f32 / 50.0 }), // one takes all
        edge(65, &|_, _| 0.25),                              // ties: the first six
        edge(40, &|n, e| if e / 6 == n { 1.0 } else { -1.0 - e as f32 / 256.0 }), // one row an expert
        edge(33, &|_, e| if e % 43 == 7 { -1.0 } else { -200.0 }), // six scores above 0
    ] {
        check_moe(&gpu, &mut random, kind, &moe, &logits);
    }
}
