//! Where each tensor goes: tiles for the fast path, as it is for the general one.

use super::{
    driver::Buffer,
    load::{Loader, Origin},
};
use crate::{
    error::{Error, Result},
    kernels::{RepackArgs, repack_kernel, repack_launch},
    plan::{FastMlp, FastMoe, FastWeights, GeneralMlp, GeneralWeights, Packed, Stored, WeightPlan},
    tiles::{TILE_COLS, TILE_ROWS, TileFormat, pack_parts},
};

impl Loader<'_> {
    /// Writes all weights to `to`, where `plan` says, and the scales that are arguments into `plan`.
    pub fn fill(&mut self, plan: &mut WeightPlan, to: &Buffer) -> Result<()> {
        match plan {
            WeightPlan::Fast(format, weights) => {
                // The embedding is not packed, and the LM head is packed alone.
                let half = self.largest(|name| name.starts_with("blk.")).next_multiple_of(256);
                let len = self.largest(|name| name == "output.weight").max(2 * half);
                let scratch = self.device.alloc("a scratch buffer for weights", len)?;
                Packer { loader: self, format: *format, scratch, half: half as u64, to }.fill(weights)
            }
            WeightPlan::General(weights) => fill_general(self, weights, to),
        }
    }

    fn put_vector(&mut self, name: &str, to: &Buffer, offset: u64) -> Result<()> {
        let values = self.vector(name);
        self.put_f32(&values, to, offset)
    }
}

fn fill_general(loader: &mut Loader<'_>, weights: &GeneralWeights, to: &Buffer) -> Result<()> {
    let stack = |loader: &mut Loader<'_>, name: &str, stored: &Stored| -> Result<()> {
        let matrices = loader.matrices(name);
        let scales: Vec<f32> = matrices.iter().map(Origin::scale).collect();
        loader.put_f32(&scales, to, stored.scales)?;
        let mut offset = stored.data;
        for matrix in matrices {
            loader.put(matrix, to, offset)?;
            offset += matrix.bytes() as u64;
        }
        Ok(())
    };
    stack(loader, "token_embd.weight", &weights.embedding)?;
    stack(loader, "output.weight", &weights.lm_head)?;
    for (index, layer) in weights.layers.iter().enumerate() {
        let name = |part: &str| format!("blk.{index}.{part}.weight");
        for (part, stored) in
            [("attn_q", &layer.q), ("attn_k", &layer.k), ("attn_v", &layer.v), ("attn_output", &layer.output)]
        {
            stack(loader, &name(part), stored)?;
        }
        let swiglu = |loader: &mut Loader<'_>, suffix: &str, stored: &[Stored; 3]| -> Result<()> {
            for (part, stored) in ["gate", "up", "down"].iter().zip(stored) {
                stack(loader, &name(&format!("ffn_{part}{suffix}")), stored)?;
            }
            Ok(())
        };
        match &layer.mlp {
            GeneralMlp::Dense(dense) => swiglu(loader, "", dense)?,
            GeneralMlp::Moe { router, experts, shared } => {
                swiglu(loader, "_exps", experts)?;
                swiglu(loader, "_shexp", shared)?;
                stack(loader, &name("ffn_gate_inp"), router)?;
            }
        }
        for (part, offset) in [
            ("attn_norm", layer.attn_norm),
            ("attn_q_norm", layer.q_norm),
            ("attn_k_norm", layer.k_norm),
            ("attn_sinks", layer.sinks),
            ("ffn_norm", layer.mlp_norm),
        ] {
            loader.put_vector(&name(part), to, offset)?;
        }
    }
    loader.put_vector("output_norm.weight", to, weights.final_norm)
}

/// Packs matrices into tiles, through scratch memory that holds two of them as the file has them.
struct Packer<'a, 'b> {
    loader: &'a mut Loader<'b>,
    format: TileFormat,
    scratch: Buffer,
    /// Where the second of two matrices starts in it.
    half: u64,
    to: &'a Buffer,
}

impl<'b> Packer<'_, 'b> {
    fn fill(&mut self, weights: &mut FastWeights) -> Result<()> {
        let embedding = self.one("token_embd.weight");
        self.loader.put(embedding, self.to, weights.embedding)?;
        for (index, layer) in weights.layers.iter_mut().enumerate() {
            let name = |part: &str| format!("blk.{index}.{part}.weight");
            let qkv = ["attn_q", "attn_k", "attn_v"].map(|part| self.one(&name(part)));
            self.rows(&qkv, layer.qkv)?;
            let output = self.one(&name("attn_output"));
            self.rows(&[output], layer.output)?;
            match &mut layer.mlp {
                FastMlp::Dense { up, down } => {
                    let [gate, up_rows, down_rows] =
                        ["gate", "up", "down"].map(|p| self.one(&name(&format!("ffn_{p}"))));
                    self.pair(gate, up_rows, *up)?;
                    self.rows(&[down_rows], *down)?;
                }
                FastMlp::Moe(FastMoe { router, router_parts, shared_up, up, down, shared_down, shared_down_scale }) => {
                    let [shared_gate, shared_up_rows, shared_down_rows] =
                        ["gate", "up", "down"].map(|p| self.one(&name(&format!("ffn_{p}_shexp"))));
                    self.pair(shared_gate, shared_up_rows, *shared_up)?;
                    self.pack_rows(shared_down_rows, *shared_down)?;
                    *shared_down_scale = shared_down_rows.scale();
                    self.experts(index, *up, *down)?;
                    let logits = self.one(&name("ffn_gate_inp"));
                    self.loader.put_as_f32(logits, self.to, *router)?;
                    self.router_parts(logits, *router_parts)?;
                }
            }
            for (part, offset) in [
                ("attn_norm", layer.attn_norm),
                ("attn_q_norm", layer.q_norm),
                ("attn_k_norm", layer.k_norm),
                ("attn_sinks", layer.sinks),
                ("ffn_norm", layer.mlp_norm),
            ] {
                self.loader.put_vector(&name(part), self.to, offset)?;
            }
        }
        self.loader.put_vector("output_norm.weight", self.to, weights.final_norm)?;
        let lm_head = self.one("output.weight");
        self.rows(&[lm_head], weights.lm_head)
    }

    fn one(&self, name: &str) -> Origin<'b> {
        self.loader.matrices(name)[0]
    }

    /// Matrices below each other, with their scale for both halves of each strip.
    fn rows(&mut self, matrices: &[Origin<'_>], place: Packed) -> Result<()> {
        let mut tiles = place.tiles;
        let mut scales = Vec::new();
        for &matrix in matrices {
            self.pack_rows(matrix, tiles)?;
            tiles += self.tile_bytes(matrix);
            scales.extend(vec![matrix.scale(); matrix.rows() / TILE_ROWS * 2]);
        }
        self.loader.put_f32(&scales, self.to, place.scales)
    }

    /// Gate and up in the two halves of each strip, with the scales of both.
    fn pair(&mut self, gate: Origin<'_>, up: Origin<'_>, place: Packed) -> Result<()> {
        self.pack_pair(gate, up, place.tiles)?;
        let scales = [gate.scale(), up.scale()].repeat(2 * gate.rows() / TILE_ROWS);
        self.loader.put_f32(&scales, self.to, place.scales)
    }

    fn experts(&mut self, layer: usize, up_place: Packed, down_place: Packed) -> Result<()> {
        let [gate, up, down] =
            ["gate", "up", "down"].map(|p| self.loader.matrices(&format!("blk.{layer}.ffn_{p}_exps.weight")));
        let (mut up_tiles, mut down_tiles) = (up_place.tiles, down_place.tiles);
        let (mut up_scales, mut down_scales) = (Vec::new(), Vec::new());
        for ((gate, up), down) in gate.into_iter().zip(up).zip(down) {
            self.pack_pair(gate, up, up_tiles)?;
            self.pack_rows(down, down_tiles)?;
            up_tiles += self.tile_bytes(gate) + self.tile_bytes(up);
            down_tiles += self.tile_bytes(down);
            up_scales.extend([gate.scale(), up.scale()]);
            down_scales.push(down.scale());
        }
        self.loader.put_f32(&up_scales, self.to, up_place.scales)?;
        self.loader.put_f32(&down_scales, self.to, down_place.scales)
    }

    /// The parts of a router for prefill, packed here: it is small, and fp32.
    fn router_parts(&mut self, router: Origin<'_>, tiles: u64) -> Result<()> {
        let packed = pack_parts(&router.values(), router.cols());
        self.loader.put_bytes(&packed, self.to, tiles)
    }

    /// Row r is row r % 16 of strip r / 16.
    fn pack_rows(&mut self, matrix: Origin<'_>, tiles: u64) -> Result<()> {
        self.loader.put(matrix, &self.scratch, 0)?;
        let low = self.scratch.address();
        let high = low + (TILE_ROWS / 2 * self.format.row_bytes(matrix.cols())) as u64;
        self.repack(low, high, tiles, matrix.rows() / TILE_ROWS, matrix.cols(), TILE_ROWS)
    }

    /// Row r of `gate` is row r % 8 of strip r / 8, and row r of `up` 8 rows below it.
    fn pack_pair(&mut self, gate: Origin<'_>, up: Origin<'_>, tiles: u64) -> Result<()> {
        self.loader.put(gate, &self.scratch, 0)?;
        self.loader.put(up, &self.scratch, self.half)?;
        let low = self.scratch.address();
        self.repack(low, low + self.half, tiles, 2 * gate.rows() / TILE_ROWS, gate.cols(), TILE_ROWS / 2)
    }

    fn repack(&self, low: u64, high: u64, tiles: u64, strips: usize, cols: usize, row_step: usize) -> Result<()> {
        let (strips, k_tiles) = (strips as u32, (cols / TILE_COLS) as u32);
        let launch = repack_launch(strips, k_tiles, self.format).ok_or_else(|| {
            let what = "packing a matrix".into();
            Error::Device { what, why: format!("a grid does not cover {strips} x {k_tiles} tiles") }
        })?;
        let bytes = u64::from(strips) * u64::from(k_tiles) * self.format.tile_bytes() as u64;
        assert!(tiles + bytes <= self.to.len() as u64, "tiles behind the end of the weights");
        let args = RepackArgs {
            low,
            high,
            tiles: self.to.address() + tiles,
            strips,
            k_tiles,
            row_step: row_step as u32,
            reserved: 0,
        };
        let function = self.loader.kernels.get(repack_kernel(self.format))?;
        // SAFETY: the argument is of this kernel; `low` and `high` lie in the scratch memory, which holds the matrices whose
        // rows are counted here, and `tiles` has room, checked above; all are multiples of 16 and live until the stream has
        // passed: freeing waits for it.
        unsafe { function.launch(launch, false, &args) }
    }

    fn tile_bytes(&self, matrix: Origin<'_>) -> u64 {
        let tiles = matrix.rows() / TILE_ROWS * (matrix.cols() / TILE_COLS);
        (tiles * self.format.tile_bytes()) as u64
    }
}
