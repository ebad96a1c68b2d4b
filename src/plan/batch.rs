//! Steps of more sequences than the kernels of decode hold, on the fast path: one new token each, through the products of
//! prefill and decode's attention in its form for many.

use super::{
    Bases, Buffers, Ending, FastWeights, Plan, Step, fast,
    prefill::{self, Norm},
};
use crate::tiles::TileFormat;

/// The launches of a step of 9 to 256 rows without its sampler, see [`Plan::steps`].
pub(super) fn steps(
    plan: &Plan,
    format: TileFormat,
    weights: &FastWeights,
    bases: &Bases,
    positions: &[u32],
    ending: Ending,
) -> Vec<Step> {
    let many = prefill::Builder::new(plan, format, bases, positions.len());
    let mut decode = fast::Builder::new(plan, format, bases, positions);
    // What decode's kernels read and write lies where prefill's find it.
    let (rows, b) = (decode.buffers, &many.buffers);
    decode.buffers = Buffers { delta: b.delta, residual: b.residual, qkv: b.qkv, attn: b.attn, ..rows };
    decode.panel_rows = many.panel_rows();
    let mut steps = vec![decode.embed(weights), many.norm(Norm::of(weights, 0))];
    for (index, (layer, cache)) in weights.layers.iter().zip(plan.cache(bases)).enumerate() {
        steps.push(many.qkv(index, layer));
        steps.push(decode.attention(index, layer, &cache));
        steps.push(many.output(index, layer));
        let last = index + 1 == weights.layers.len() && ending == Ending::Nothing;
        many.mlp(index, layer, (!last).then(|| Norm::of(weights, index + 1)), &mut steps);
    }
    if ending != Ending::Nothing {
        steps.push(many.logits(weights, rows.logits));
    }
    steps
}
