//! The products of the fast decode path against the CPU's reference, at Flint's own dimensions. They need a GPU, so
//! `cargo test` counts these as ignored; `make test-gpu` runs them.

#![cfg(feature = "cuda")]
#![allow(clippy::float_cmp, reason = "equal means the same bits")]

mod cpu_support;
mod kernel_support;

use cpu_support::{Kind, Random, configs, matrix};
use flint_rs::{
    cancel::Cancel,
    config::FlintConfig,
    cpu::{
        Precision::{Bfloat16, Float32},
        Rope,
        reference::{Routes, project, rms_norm_residual, silu, swiglu_act},
    },
    gpu::Buffer,
    kernels::decode::{self, *},
    tiles::TileFormat,
    weights::{Matrix, SwiGlu},
};
use kernel_support::{Gpu, assert_close, bf16_step, output, packed::Packed, rms, to_bf16s, to_f32s};

const FORMATS: [(Kind, TileFormat); 2] = [(Kind::Nvfp4, TileFormat::Nvfp4), (Kind::Bf16, TileFormat::Bf16)];
const EPS: f32 = 1e-6;
/// One more than each kernel was compiled for, and each itself.
const STEPS: [usize; 6] = [1, 2, 3, 4, 7, 8];

fn swiglu_weights(random: &mut Random, kind: Kind, width: usize, hidden: usize) -> SwiGlu {
    SwiGlu {
        gate: matrix(random, kind, width, hidden),
        up: matrix(random, kind, width, hidden),
        down: matrix(random, kind, hidden, width),
    }
}

/// What stands in front of the kernels that norm their input, on both sides.
struct Norm {
    rows: usize,
    delta: Vec<f32>,
    residual: Vec<f32>,
    weight: Vec<f32>,
    buffers: [Buffer; 5],
}

impl Norm {
    fn new(gpu: &Gpu, random: &mut Random, rows: usize) -> Self {
        let delta = random.bf16s(rows * HIDDEN);
        let residual = random.bf16s(rows * HIDDEN);
        let weight: Vec<f32> = random.normals(HIDDEN).iter().map(|x| 1.0 + 0.2 * x).collect();
        let buffers = [
            gpu.bf16s(&delta),
            gpu.bf16s(&residual),
            gpu.f32s(&weight),
            gpu.poisoned(rows * HIDDEN * 2),
            gpu.poisoned(rows * HIDDEN * 2),
        ];
        Self { rows, delta, residual, weight, buffers }
    }

    /// Row `row` alone.
    fn row(&self, gpu: &Gpu, row: usize) -> Self {
        let range = row * HIDDEN..(row + 1) * HIDDEN;
        let (delta, residual) = (self.delta[range.clone()].to_vec(), self.residual[range].to_vec());
        let buffers = [
            gpu.bf16s(&delta),
            gpu.bf16s(&residual),
            gpu.f32s(&self.weight),
            gpu.poisoned(HIDDEN * 2),
            gpu.poisoned(HIDDEN * 2),
        ];
        Self { rows: 1, delta, residual, weight: self.weight.clone(), buffers }
    }

    fn args(&self) -> NormArgs {
        let [delta, residual, weight, new_residual, normed] = self.buffers.each_ref().map(Buffer::address);
        NormArgs { delta, residual, new_residual, normed, weight, eps: EPS, rows: self.rows as u32 }
    }

    /// Checks what block 0 wrote; returns the normed rows as the kernel has them, so that one rounding of the norm to its
    /// neighbour is not counted again in what follows.
    fn check(&self) -> Vec<f32> {
        let mut residual = self.residual.clone();
        let normed = rms_norm_residual(&self.delta, &mut residual, &self.weight, EPS, Bfloat16);
        let len = self.rows * HIDDEN * 2;
        assert_eq!(to_bf16s(&output(&self.buffers[3], len)), residual, "new residual");
        let found = to_bf16s(&output(&self.buffers[4], len));
        assert_close("normed", &found, &normed, |i| bf16_step(normed[i]));
        let equal = found.iter().zip(&normed).filter(|(a, b)| a == b).count();
        assert!(
            equal * 1000 >= normed.len() * 995,
            "{equal} of {} equal: only the order of a sum differs",
            normed.len()
        );
        found
    }
}

/// fp32 sums of exact products in another order: 1e-6 of the norms is ten times what was seen on other kernels of this
/// kind. Then one rounding to BF16.
fn check_product(what: &str, found: &[f32], exact: &[f32], rounded: bool) {
    let spread = rms(exact);
    let bound = |i: usize| 1e-5 * spread + if rounded { bf16_step(exact[i]) / 2.0 } else { 0.0 };
    assert_close(what, found, exact, bound);
}

#[derive(Clone, Copy, PartialEq)]
enum After {
    Bf16,
    F32,
    SwiGlu,
}

#[allow(clippy::too_many_arguments, reason = "a launch, taken apart once")]
fn linear(
    gpu: &Gpu,
    family: &decode::Family,
    shape: LinearShape,
    after: After,
    format: TileFormat,
    norm: NormArgs,
    x: u64,
    packed: &Packed,
    pdl: bool,
) -> Vec<u8> {
    let strips = packed.scales.len() / 2;
    let out_len = strips * if after == After::SwiGlu { 8 } else { 16 };
    let bytes = norm.rows as usize * out_len * if after == After::F32 { 4 } else { 2 };
    let (weights, scales, out) = (gpu.upload(&packed.tiles), gpu.f32s(&packed.scales), gpu.poisoned(bytes));
    let args = DecodeLinearArgs {
        norm,
        x,
        weights: weights.address(),
        scales: scales.address(),
        out: out.address(),
        strips: strips as u32,
        out_stride: out_len as u32,
    };
    let rows = norm.rows as usize;
    // SAFETY: every buffer has the extent that the struct states, and lives until the download in `output`.
    unsafe { gpu.launch(family.kernel(format, rows), shape.launch(format, rows, strips, bytes as u64), pdl, &args) };
    output(&out, bytes)
}

/// Products that norm their input. Every row of a step equals the row alone, bit for bit, whatever kernel ran it.
fn normed_product(family: &decode::Family, shape: impl Fn(TileFormat) -> LinearShape, after: After, rows_of: &[usize]) {
    let (gpu, mut random) = (Gpu::open(), Random::fresh());
    for (kind, format) in FORMATS {
        let shape = shape(format);
        let matrices: Vec<Matrix> = rows_of.iter().map(|&n| matrix(&mut random, kind, n, HIDDEN)).collect();
        let packed = if after == After::SwiGlu {
            Packed::gate_up(format, &matrices[0], &matrices[1])
        } else {
            Packed::plain(format, &matrices.iter().collect::<Vec<_>>())
        };
        let mut alone: Option<(Norm, Vec<Vec<u8>>)> = None;
        for rows in STEPS.into_iter().rev() {
            let norm = match &alone {
                None => Norm::new(&gpu, &mut random, 8),
                Some((eight, _)) => {
                    let part = |x: &[f32]| x[..rows * HIDDEN].to_vec();
                    let (delta, residual) = (part(&eight.delta), part(&eight.residual));
                    let buffers = [
                        gpu.bf16s(&delta),
                        gpu.bf16s(&residual),
                        gpu.f32s(&eight.weight),
                        gpu.poisoned(rows * HIDDEN * 2),
                        gpu.poisoned(rows * HIDDEN * 2),
                    ];
                    Norm { rows, delta, residual, weight: eight.weight.clone(), buffers }
                }
            };
            let found = linear(&gpu, family, shape, after, format, norm.args(), 0, &packed, rows % 2 == 0);
            let x = norm.check();
            let row_bytes = found.len() / rows;
            if let Some((_, alone)) = &alone {
                for (row, bytes) in found.chunks_exact(row_bytes).enumerate() {
                    assert!(bytes == alone[row], "row {row} of {rows} differs from the row alone");
                }
                continue;
            }
            let cancel = Cancel::default();
            let products: Vec<Vec<f32>> = matrices.iter().map(|m| project(m, &x, Float32, &cancel).unwrap()).collect();
            let values = if after == After::F32 { to_f32s(&found) } else { to_bf16s(&found) };
            for row in 0..rows {
                let of = |m: usize| &products[m][row * matrices[m].rows..][..matrices[m].rows];
                let found = &values[row * values.len() / rows..][..values.len() / rows];
                if after == After::SwiGlu {
                    let exact: Vec<f32> = of(0).iter().zip(of(1)).map(|(&g, &u)| silu(g) * u).collect();
                    // silu's exponential is the hardware's, good to 2^-21.
                    let bound = |i: usize| 1e-5 * rms(&exact) + bf16_step(exact[i]) * 0.51;
                    assert_close("swiglu", found, &exact, bound);
                } else {
                    let exact: Vec<f32> = (0..matrices.len()).flat_map(of).copied().collect();
                    check_product("product", found, &exact, after == After::Bf16);
                }
            }
            let singles = (0..8)
                .map(|row| {
                    let one = norm.row(&gpu, row);
                    linear(&gpu, family, shape, after, format, one.args(), 0, &packed, true)
                })
                .collect::<Vec<_>>();
            for (row, bytes) in found.chunks_exact(row_bytes).enumerate() {
                assert!(bytes == singles[row], "row {row} of 8 differs from the row alone");
            }
            alone = Some((norm, singles));
        }
    }
}

#[test]
#[ignore = "needs a CUDA GPU: make test-gpu"]
fn qkv() {
    normed_product(&DECODE_QKV, |_| QKV_SHAPE, After::Bf16, &[4096, 512, 512]);
}

#[test]
#[ignore = "needs a CUDA GPU: make test-gpu"]
fn dense_up() {
    normed_product(&DECODE_DENSE_UP, |_| DENSE_UP_SHAPE, After::SwiGlu, &[6144, 6144]);
}

#[test]
#[ignore = "needs a CUDA GPU: make test-gpu"]
fn lm_head() {
    // A number of strips that neither the warps nor the blocks divide.
    normed_product(&DECODE_LM_HEAD, |format| LinearShape::lm_head(132, format), After::F32, &[16 * 2753]);
}

/// Products of plain rows.
fn plain_product(family: &decode::Family, shape: LinearShape, cols: usize) {
    let (gpu, mut random) = (Gpu::open(), Random::fresh());
    for (kind, format) in FORMATS {
        let weights = matrix(&mut random, kind, HIDDEN, cols);
        let packed = Packed::plain(format, &[&weights]);
        let x = random.bf16s(8 * cols);
        let exact = project(&weights, &x, Float32, &Cancel::default()).unwrap();
        let run = |x: &[f32], pdl| {
            let norm = NormArgs { rows: (x.len() / cols) as u32, ..NormArgs::default() };
            let x = gpu.bf16s(x);
            linear(&gpu, family, shape, After::Bf16, format, norm, x.address(), &packed, pdl)
        };
        // As a plan does where a block has not the shared memory for 8 rows.
        let halves = [run(&x[..4 * cols], false), run(&x[4 * cols..], false)].concat();
        check_product("product", &to_bf16s(&halves), &exact, true);
        let most = gpu.device.card().unwrap().block_shared_bytes;
        for rows in STEPS.into_iter().filter(|&rows| shape.launch(format, rows, 1, 0).shared_bytes as usize <= most) {
            assert!(run(&x[..rows * cols], true) == halves[..rows * HIDDEN * 2], "{rows} rows differ from twice 4");
        }
    }
}

#[test]
#[ignore = "needs a CUDA GPU: make test-gpu"]
fn output_projection() {
    plain_product(&DECODE_O, LinearShape::o(132), 4096);
}

#[test]
#[ignore = "needs a CUDA GPU: make test-gpu"]
fn dense_down() {
    plain_product(&DECODE_DENSE_DOWN, LinearShape::dense_down(132), 6144);
}

/// A MoE layer whose 256 experts are 12 different ones in turn, so that a test makes and packs few.
struct Moe {
    router: Matrix,
    experts: Vec<SwiGlu>,
    shared: SwiGlu,
    router_buffer: Buffer,
    gate_up: [Buffer; 2],
    down: [Buffer; 2],
    shared_gate_up: [Buffer; 2],
    shared_down: Buffer,
}

const DISTINCT: usize = 12;

impl Moe {
    fn new(gpu: &Gpu, random: &mut Random, kind: Kind, format: TileFormat) -> Self {
        let experts: Vec<SwiGlu> = (0..DISTINCT).map(|_| swiglu_weights(random, kind, EXPERT_WIDTH, HIDDEN)).collect();
        let shared = swiglu_weights(random, kind, SHARED_WIDTH, HIDDEN);
        let router = matrix(random, Kind::F32, EXPERTS, HIDDEN);
        let all = |parts: &[Packed], scales: usize| {
            let turns = (0..EXPERTS).map(|e| &parts[e % DISTINCT]);
            let tiles = turns.clone().flat_map(|p| p.tiles.iter().copied()).collect::<Vec<u8>>();
            let scales = turns.flat_map(|p| p.scales[..scales].iter().copied()).collect::<Vec<f32>>();
            [gpu.upload(&tiles), gpu.f32s(&scales)]
        };
        let gate_up: Vec<Packed> = experts.iter().map(|e| Packed::gate_up(format, &e.gate, &e.up)).collect();
        let down: Vec<Packed> = experts.iter().map(|e| Packed::plain(format, &[&e.down])).collect();
        let shared_up = Packed::gate_up(format, &shared.gate, &shared.up);
        Self {
            gate_up: all(&gate_up, 2),
            down: all(&down, 1),
            shared_gate_up: [gpu.upload(&shared_up.tiles), gpu.f32s(&shared_up.scales)],
            shared_down: gpu.upload(&Packed::plain(format, &[&shared.down]).tiles),
            router_buffer: gpu.upload(router.data.bytes()),
            router,
            experts,
            shared,
        }
    }

    fn expert(&self, e: usize) -> &SwiGlu {
        &self.experts[e % DISTINCT]
    }
}

/// What the three kernels of a MoE layer wrote.
struct MoeOutput {
    scores: Vec<u8>,
    act_shared: Vec<u8>,
    act: Vec<u8>,
    delta: Vec<u8>,
}

/// Runs the layer; `scores` in place of the router's own for the choice of experts.
fn run_moe(gpu: &Gpu, moe: &Moe, format: TileFormat, norm: &Norm, scores: Option<&[f32]>, pdl: bool) -> MoeOutput {
    let rows = norm.rows;
    let lens = [EXPERTS * 4, SHARED_WIDTH * 2, CHOSEN * EXPERT_WIDTH * 2, HIDDEN * 2].map(|len| len * rows);
    let [own_scores, act_shared, act, delta] = lens.map(|len| gpu.poisoned(len));
    let given = scores.map(|scores| gpu.f32s(scores));
    let scores = given.as_ref().unwrap_or(&own_scores).address();
    let router =
        DecodeRouterArgs { norm: norm.args(), router: moe.router_buffer.address(), scores: own_scores.address() };
    let up = DecodeExpertsUpArgs {
        x: norm.args().normed,
        scores,
        gate_up: moe.gate_up[0].address(),
        scales: moe.gate_up[1].address(),
        act: act.address(),
        shared_gate_up: moe.shared_gate_up[0].address(),
        shared_scales: moe.shared_gate_up[1].address(),
        act_shared: act_shared.address(),
        rows: rows as u32,
        reserved: 0,
    };
    let down = DecodeDownArgs {
        scores,
        down: moe.down[0].address(),
        scales: moe.down[1].address(),
        shared_down: moe.shared_down.address(),
        act: act.address(),
        act_shared: act_shared.address(),
        delta: delta.address(),
        shared_scale: moe.shared.down.scale(),
        rows: rows as u32,
    };
    // SAFETY: every buffer has the extent that the structs state, and lives until the downloads below.
    unsafe {
        gpu.launch(DECODE_ROUTER.kernel(format, rows), decode_router_launch(rows, 132), pdl, &router);
        gpu.launch(DECODE_EXPERTS_UP.kernel(format, rows), decode_experts_up_launch(format, rows, 44), pdl, &up);
        gpu.launch(DECODE_DOWN.kernel(format, rows), decode_down_launch(format, rows, 44, 132), pdl, &down);
    }
    let [scores, act_shared, act, delta] =
        [(&own_scores, lens[0]), (&act_shared, lens[1]), (&act, lens[2]), (&delta, lens[3])]
            .map(|(buffer, len)| output(buffer, len));
    MoeOutput { scores, act_shared, act, delta }
}

fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}

/// The reference from the normed rows `x` and the scores that choose, against `out`.
fn check_moe(moe: &Moe, x: &[f32], scores: &[f32], out: &MoeOutput) {
    let cancel = Cancel::default();
    let logits = project(&moe.router, x, Float32, &cancel).unwrap();
    // As in `check_product`; a sigmoid is at most a quarter as steep, and its exponential is good to 2^-21.
    let bound = 0.25e-5 * rms(&logits) + 1e-6;
    let exact: Vec<f32> = logits.into_iter().map(sigmoid).collect();
    assert_close("router", &to_f32s(&out.scores), &exact, |_| bound);
    let shared = swiglu_act(&moe.shared, x, Float32, &cancel).unwrap();
    let near = |exact: &[f32]| {
        let (exact, spread) = (exact.to_vec(), rms(exact));
        move |i: usize| 1e-5 * spread + bf16_step(exact[i]) * 0.51
    };
    assert_close("shared act", &to_bf16s(&out.act_shared), &shared, near(&shared));
    let routes = Routes::from_scores(scores, EXPERTS, CHOSEN);
    let act = to_bf16s(&out.act);
    for (row, x) in x.chunks_exact(HIDDEN).enumerate() {
        let mut chosen: Vec<(usize, f32)> = routes.of(row).collect();
        chosen.sort_unstable_by_key(|&(e, _)| e);
        let mut routed = vec![0f32; HIDDEN];
        for (slot, &(e, weight)) in chosen.iter().enumerate() {
            let exact = swiglu_act(moe.expert(e), x, Float32, &cancel).unwrap();
            let found = &act[(row * CHOSEN + slot) * EXPERT_WIDTH..][..EXPERT_WIDTH];
            assert_close(&format!("row {row}, slot {slot}: expert {e}"), found, &exact, near(&exact));
            // From the kernel's own activations, so that their rounding is not counted twice.
            for (sum, y) in routed.iter_mut().zip(project(&moe.expert(e).down, found, Bfloat16, &cancel).unwrap()) {
                *sum += weight * y;
            }
        }
        let act_shared = to_bf16s(&out.act_shared[row * SHARED_WIDTH * 2..][..SHARED_WIDTH * 2]);
        let shared = project(&moe.shared.down, &act_shared, Bfloat16, &cancel).unwrap();
        let exact: Vec<f32> = routed.iter().zip(&shared).map(|(r, s)| Bfloat16.round(*r) + s).collect();
        let found = to_bf16s(&out.delta[row * HIDDEN * 2..][..HIDDEN * 2]);
        // Each of the roundings before the last may go to a neighbour: those of the summands, of routed and of shared.
        let largest = |i: usize| bf16_step(routed[i].abs().max(shared[i].abs()).max(exact[i].abs()));
        assert_close("delta", &found, &exact, |i| 1.5 * largest(i) + 0.01 * rms(&exact) / 2.0);
        let equal = found.iter().zip(&exact).filter(|&(&f, &e)| f == Bfloat16.round(e)).count();
        assert!(equal * 100 >= HIDDEN * 97, "{equal} of {HIDDEN} equal");
    }
}

#[test]
#[ignore = "needs a CUDA GPU: make test-gpu"]
fn moe_layer() {
    let (gpu, mut random) = (Gpu::open(), Random::fresh());
    for (kind, format) in FORMATS {
        let moe = Moe::new(&gpu, &mut random, kind, format);
        let norm = Norm::new(&gpu, &mut random, 8);
        let eight = run_moe(&gpu, &moe, format, &norm, None, false);
        let x = norm.check();
        check_moe(&moe, &x, &to_f32s(&eight.scores), &eight);
        for row in 0..8 {
            let one = run_moe(&gpu, &moe, format, &norm.row(&gpu, row), None, true);
            for (name, one, eight) in [
                ("scores", &one.scores, &eight.scores),
                ("act_shared", &one.act_shared, &eight.act_shared),
                ("act", &one.act, &eight.act),
                ("delta", &one.delta, &eight.delta),
            ] {
                assert!(
                    eight[row * one.len()..][..one.len()] == one[..],
                    "{name} of row {row} differs from the row alone"
                );
            }
        }
    }
}

#[test]
#[ignore = "needs a CUDA GPU: make test-gpu"]
fn choices_at_the_edges() {
    let (gpu, mut random) = (Gpu::open(), Random::fresh());
    let (kind, format) = FORMATS[0];
    let moe = Moe::new(&gpu, &mut random, kind, format);
    let edge = |f: &dyn Fn(usize) -> f32| (0..EXPERTS).map(f).collect::<Vec<f32>>();
    let rows = [
        edge(&|_| 0.25),                                         // all equal: the first six
        edge(&|e| if e < 250 { -3.0 } else { 2.0 }),             // the last six, equal
        edge(&|e| if e % 51 == 7 { 40.0 } else { 30.0 }),        // scores that round to 1 for all
        edge(&|_| -200.0),                                       // scores of 0 for all but ...
        edge(&|e| (e as f32 * 0.7).sin()),                       // distinct
        edge(&|e| if (3..9).contains(&e) { 1.0 } else { -1.0 }), // across two lanes
        edge(&|e| -(e as f32)),                                  // falling
        edge(&|e| e as f32 / 64.0),                              // rising
    ];
    let mut logits = rows.concat();
    // ... the row whose scores underflow: six of them do not.
    for e in [0, 31, 32, 100, 254, 255] {
        logits[3 * EXPERTS + e] = -1.0 - e as f32 / 256.0;
    }
    let scores: Vec<f32> = logits.into_iter().map(sigmoid).collect();
    for n in [8, 5, 1] {
        let norm = Norm::new(&gpu, &mut random, n);
        let out = run_moe(&gpu, &moe, format, &norm, Some(&scores[..n * EXPERTS]), true);
        check_moe(&moe, &norm.check(), &scores[..n * EXPERTS], &out);
    }
}

#[test]
#[ignore = "needs a CUDA GPU: make test-gpu"]
fn embedding() {
    let (gpu, mut random) = (Gpu::open(), Random::fresh());
    let table = random.bf16s(100 * HIDDEN);
    let tokens = [99u32, 0, 7, 7, 42];
    let (embedding, ids) = (gpu.bf16s(&table), gpu.u32s(&tokens));
    let len = tokens.len() * HIDDEN * 2;
    let (delta, residual) = (gpu.poisoned(len), gpu.poisoned(len));
    let positions = [0u32, 1, 513, 100_001, 262_143];
    let expected_rope = Rope::new(&FlintConfig { head_dim: 128, rope_theta: 10_000.0, ..configs(false)[0].clone() });
    let (position_ids, inv_freq) = (gpu.u32s(&positions), gpu.f32s(expected_rope.inv_freq()));
    let rope_len = positions.len() * 128 * 4;
    let rope = gpu.poisoned(rope_len);
    let args = DecodeEmbedArgs {
        embedding: embedding.address(),
        tokens: ids.address(),
        positions: position_ids.address(),
        inv_freq: inv_freq.address(),
        delta: delta.address(),
        residual: residual.address(),
        rope: rope.address(),
    };
    // SAFETY: every buffer has the extent that the struct states, and lives until the downloads below.
    unsafe { gpu.launch(DECODE_EMBED, decode_embed_launch(tokens.len()), true, &args) };
    let expected: Vec<f32> = tokens.iter().flat_map(|&t| &table[t as usize * HIDDEN..][..HIDDEN]).copied().collect();
    assert_eq!(to_bf16s(&output(&delta, len)), expected);
    assert!(output(&residual, len).iter().all(|&byte| byte == 0));
    for (found, position) in to_f32s(&output(&rope, rope_len)).chunks_exact(128).zip(positions) {
        let table = expected_rope.table(position as usize..position as usize + 1);
        assert!(found.split_at(64) == table.at(0), "position {position}: other angles than the CPU's");
    }
}
