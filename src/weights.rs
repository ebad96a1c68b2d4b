//! The weights of a Flint, bound by name from a checkpoint with type and shape checked: the whole list that the model
//! needs, and nothing else. Backends read these and never a file.

mod gguf;
mod list;
mod matrix;
mod safetensors;
mod source;
mod synthetic;
mod table;

use std::collections::BTreeMap;

use rayon::prelude::*;

#[cfg(feature = "cuda")]
pub(crate) use self::synthetic::MatrixRecipe;
pub use self::{
    list::{ParameterCount, parameter_count},
    matrix::{Matrix, MatrixData},
};
pub(crate) use self::{
    list::{Shape, Spec, list},
    matrix::decode,
    source::Source,
    synthetic::{Recipe, recipes},
};
use crate::{
    cancel::Cancel,
    checkpoint::Checkpoint,
    config::{FlintConfig, Mlp},
    error::Result,
    threads,
};

/// Bytes checked between two reports of progress.
const BATCH_BYTES: usize = 64 << 20;

/// down(silu(gate(x)) * up(x)).
#[derive(Clone, Debug)]
pub struct SwiGlu {
    /// `[F, D]`.
    pub gate: Matrix,
    /// `[F, D]`.
    pub up: Matrix,
    /// `[D, F]`.
    pub down: Matrix,
}

/// The feed-forward weights of a layer.
#[derive(Clone, Debug)]
pub enum MlpWeights {
    /// A dense layer.
    Dense(SwiGlu),
    /// A mixture of experts.
    Moe {
        /// `[E, D]`; its logits stay fp32.
        router: Matrix,
        /// E routed experts.
        experts: Vec<SwiGlu>,
        /// Added in full, without a gate.
        shared: SwiGlu,
    },
}

/// The weights of one layer.
#[derive(Clone, Debug)]
pub struct LayerWeights {
    /// `[D]`, before attention.
    pub attn_norm: Vec<f32>,
    /// `[H * head_dim, D]`.
    pub q: Matrix,
    /// `[G * head_dim, D]`.
    pub k: Matrix,
    /// `[G * head_dim, D]`.
    pub v: Matrix,
    /// `[D, H * head_dim]`.
    pub o: Matrix,
    /// `[head_dim]`, shared by the query heads.
    pub q_norm: Vec<f32>,
    /// `[head_dim]`, shared by the key heads.
    pub k_norm: Vec<f32>,
    /// `[H]`, one softmax logit a query head that attends to nothing.
    pub sinks: Vec<f32>,
    /// `[D]`, before the feed-forward part.
    pub mlp_norm: Vec<f32>,
    /// The feed-forward part.
    pub mlp: MlpWeights,
}

/// All weights of a Flint.
#[derive(Clone, Debug)]
pub struct Weights {
    /// The dimensions that every shape below was checked against.
    pub config: FlintConfig,
    /// `[V, D]`; a token's row is its embedding.
    pub embedding: Matrix,
    /// One entry a layer.
    pub layers: Vec<LayerWeights>,
    /// `[D]`, before the LM head.
    pub final_norm: Vec<f32>,
    /// `[V, D]`.
    pub lm_head: Matrix,
}

/// What a [`Spec`] was found to be.
#[derive(Clone, Debug)]
pub(crate) enum Item {
    /// Read already.
    Vector(Vec<f32>),
    /// One, or one an expert; still in the file.
    Matrices(Vec<Source>),
}

/// The values of a [`Spec`].
#[derive(Clone, Debug)]
pub(crate) enum Held<'a> {
    /// A vector.
    Vector(&'a [f32]),
    /// One, or one an expert.
    Matrices(Vec<&'a Matrix>),
}

/// Finds every tensor of a Flint in `checkpoint`, by name, with type and shape checked, and refuses any other. Reads
/// vectors and scales, and no matrix.
pub(crate) fn resolve(checkpoint: &Checkpoint, config: &FlintConfig) -> Result<Vec<(Spec, Item)>> {
    let specs = list::list(config);
    let items = match checkpoint {
        Checkpoint::Gguf(gguf) => gguf::resolve(gguf, &specs)?,
        Checkpoint::Safetensors(dir) => safetensors::resolve(dir, &specs)?,
    };
    Ok(specs.into_iter().zip(items).collect())
}

impl Weights {
    /// Binds every tensor of `checkpoint`. NVFP4 weights are read whole: a scale byte that NVIDIA's format cannot hold
    /// is refused, and `ModelOpt`'s order is repacked to GGUF's in memory of our own. All other matrices stay in the mapped file.
    ///
    /// `progress` gets (bytes checked, bytes in all), from the calling thread.
    ///
    /// Errors: [`crate::Error::Format`] naming the tensor that is missing, unknown, or of a wrong type, shape or value;
    /// [`crate::Error::Cancelled`].
    pub fn bind(
        checkpoint: &Checkpoint,
        config: FlintConfig,
        progress: &mut dyn FnMut(u64, u64),
        cancel: &Cancel,
    ) -> Result<Self> {
        let pool = threads::pool(None)?;
        let mut parts = Parts::default();
        let mut sources = Vec::new();
        for (spec, item) in resolve(checkpoint, &config)? {
            match item {
                Item::Vector(values) => _ = parts.vectors.insert(spec.gguf, values),
                Item::Matrices(all) => sources.extend(all.into_iter().map(|source| (spec.gguf.clone(), source))),
            }
        }
        let bytes_of =
            |sources: &[(String, Source)]| sources.iter().map(|(_, source)| source.load_bytes()).sum::<usize>();
        let (mut done, total) = (0, bytes_of(&sources) as u64);
        progress(done, total);
        let mut rest = sources.as_slice();
        while !rest.is_empty() {
            let mut bytes = 0;
            let in_batch = |(_, source): &&(String, Source)| {
                let room = bytes < BATCH_BYTES;
                bytes += source.load_bytes();
                room
            };
            let (batch, tail) = rest.split_at(rest.iter().take_while(in_batch).count());
            let load = || batch.par_iter().map(|(_, source)| source.load(cancel)).collect::<Result<Vec<_>>>();
            let loaded = pool.install(load)?;
            for ((name, _), matrix) in batch.iter().zip(loaded) {
                parts.matrices.entry(name.clone()).or_default().push(matrix);
            }
            done += bytes_of(batch) as u64;
            progress(done, total);
            rest = tail;
        }
        Ok(parts.assemble(config))
    }

    /// Bytes of all weights as stored.
    pub fn bytes(&self) -> usize {
        let bytes = |(_, held): (Spec, Held<'_>)| match held {
            Held::Vector(values) => size_of_val(values),
            Held::Matrices(matrices) => matrices.iter().map(|matrix| matrix.data.bytes().len()).sum(),
        };
        self.tensors().into_iter().map(bytes).sum()
    }

    /// Every tensor, in the order of [`list::list`].
    pub(crate) fn tensors(&self) -> Vec<(Spec, Held<'_>)> {
        fn swiglu<'a>(experts: &'a [SwiGlu], held: &mut Vec<Held<'a>>) {
            let parts: [fn(&SwiGlu) -> &Matrix; 3] = [|w| &w.gate, |w| &w.up, |w| &w.down];
            held.extend(parts.map(|part| Held::Matrices(experts.iter().map(part).collect())));
        }
        let matrix = |matrix| Held::Matrices(vec![matrix]);
        let mut held = vec![matrix(&self.embedding), Held::Vector(&self.final_norm), matrix(&self.lm_head)];
        for layer in &self.layers {
            held.push(Held::Vector(&layer.attn_norm));
            held.extend([&layer.q, &layer.k, &layer.v, &layer.o].map(matrix));
            held.extend([&layer.q_norm, &layer.k_norm, &layer.sinks, &layer.mlp_norm].map(|v| Held::Vector(v)));
            match &layer.mlp {
                MlpWeights::Dense(dense) => swiglu(std::slice::from_ref(dense), &mut held),
                MlpWeights::Moe { router, experts, shared } => {
                    held.push(matrix(router));
                    swiglu(experts, &mut held);
                    swiglu(std::slice::from_ref(shared), &mut held);
                }
            }
        }
        list::list(&self.config).into_iter().zip(held).collect()
    }
}

/// Loaded tensors by their GGUF names: everything that [`list::list`] names.
#[derive(Default)]
struct Parts {
    vectors: BTreeMap<String, Vec<f32>>,
    matrices: BTreeMap<String, Vec<Matrix>>,
}

impl Parts {
    fn assemble(mut self, config: FlintConfig) -> Weights {
        let embedding = self.matrix("token_embd");
        let layers = config.layers.iter().enumerate().map(|(n, layer)| self.layer(n, layer.mlp)).collect();
        Weights { embedding, layers, final_norm: self.vector("output_norm"), lm_head: self.matrix("output"), config }
    }

    fn layer(&mut self, n: usize, mlp: Mlp) -> LayerWeights {
        let name = |part: &str| format!("blk.{n}.{part}");
        LayerWeights {
            attn_norm: self.vector(&name("attn_norm")),
            q: self.matrix(&name("attn_q")),
            k: self.matrix(&name("attn_k")),
            v: self.matrix(&name("attn_v")),
            o: self.matrix(&name("attn_output")),
            q_norm: self.vector(&name("attn_q_norm")),
            k_norm: self.vector(&name("attn_k_norm")),
            sinks: self.vector(&name("attn_sinks")),
            mlp_norm: self.vector(&name("ffn_norm")),
            mlp: match mlp {
                Mlp::Dense => MlpWeights::Dense(self.swiglu(n, "")),
                Mlp::Moe => MlpWeights::Moe {
                    router: self.matrix(&name("ffn_gate_inp")),
                    experts: self.swiglus(n, "_exps"),
                    shared: self.swiglu(n, "_shexp"),
                },
            },
        }
    }

    fn swiglu(&mut self, n: usize, suffix: &str) -> SwiGlu {
        self.swiglus(n, suffix).pop().expect("one matrix of each name")
    }

    fn swiglus(&mut self, n: usize, suffix: &str) -> Vec<SwiGlu> {
        let [gate, up, down] = ["gate", "up", "down"].map(|part| self.take(&format!("blk.{n}.ffn_{part}{suffix}")));
        let parts = gate.into_iter().zip(up).zip(down);
        parts.map(|((gate, up), down)| SwiGlu { gate, up, down }).collect()
    }

    fn matrix(&mut self, name: &str) -> Matrix {
        self.take(name).pop().expect("one matrix of this name")
    }

    fn take(&mut self, name: &str) -> Vec<Matrix> {
        self.matrices.remove(&format!("{name}.weight")).expect("every listed tensor was loaded")
    }

    fn vector(&mut self, name: &str) -> Vec<f32> {
        self.vectors.remove(&format!("{name}.weight")).expect("every listed tensor was loaded")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        checkpoint::DType,
        config::{Attention, LayerKind},
    };

    #[test]
    fn every_tensor_is_listed_under_its_name() {
        let layer = |mlp| LayerKind { attention: Attention::Full, rope: false, mlp };
        let config = FlintConfig {
            hidden_size: 10,
            vocab_size: 7,
            context_length: 64,
            n_heads: 4,
            n_kv_heads: 2,
            head_dim: 6,
            dense_intermediate_size: 9,
            n_experts: 3,
            n_experts_per_token: 2,
            expert_intermediate_size: 5,
            shared_intermediate_size: 8,
            sliding_window: 4,
            rms_norm_eps: 1e-6,
            rope_theta: 1e4,
            layers: vec![layer(Mlp::Dense), layer(Mlp::Moe)],
        };
        let weights = Weights::synthetic(config.clone(), 3, DType::F32).unwrap();
        let recipes = recipes(&config, 3, DType::F32).unwrap();
        let tensors = weights.tensors();
        assert_eq!(tensors.len(), recipes.len());
        for ((spec, held), (wanted, recipe)) in tensors.into_iter().zip(recipes) {
            assert_eq!(spec.gguf, wanted.gguf);
            match (held, recipe) {
                (Held::Vector(held), Recipe::Vector(values)) => assert_eq!(held, values, "{}", spec.gguf),
                (Held::Matrices(held), Recipe::Matrices(recipes)) => {
                    let bytes: Vec<Vec<u8>> = recipes.iter().map(|r| r.make().data.bytes().to_vec()).collect();
                    let held: Vec<Vec<u8>> = held.iter().map(|m| m.data.bytes().to_vec()).collect();
                    assert_eq!(held, bytes, "{}", spec.gguf);
                }
                other => panic!("{}: {other:?}", spec.gguf),
            }
        }
    }
}
