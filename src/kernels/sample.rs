//! `cuda/decode_sample.cu`: what a row's memory holds when its request starts, and what comes back.

use std::mem::offset_of;

use super::{Kernel, Launch, kernel};
use crate::{
    error::{Error, Result},
    sampling::{
        Logprob, MAX_LOGPROBS, Sampled, SamplingParams, TokenLogprobs, bad_logit, least_weight, no_possible_logit,
        nothing_left, nucleus_share, penalty_overflow,
    },
};

/// The next token of each row, and its position.
pub const DECODE_SAMPLE: Kernel = kernel::<DecodeSampleArgs>(c"decode_sample");

/// Bytes of a row's [`SampleRow`].
pub const SAMPLE_ROW_BYTES: usize = size_of::<SampleRow>();
/// Words of a record in the ring.
pub const SAMPLE_RECORD_WORDS: usize = 48;
/// The largest vocabulary.
pub const SAMPLE_VOCAB_MOST: usize = 1 << 22;

/// The argument of [`DECODE_SAMPLE`], as in `cuda/args_sample.h`. V is the vocabulary.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct DecodeSampleArgs {
    /// `[B, logits_stride]` f32.
    pub logits: u64,
    /// `[B]` [`SampleRow`], brought up to date.
    pub rows: u64,
    /// `[B, 2, ceil(V / 32)]` u32, see [`SampleStart::masks`].
    pub masks: u64,
    /// `[B, V]` f32, see [`SampleStart::bias`].
    pub bias: u64,
    /// `[B, V]` u32, see [`SampleStart::seen`]; brought up to date.
    pub seen: u64,
    /// `[B, V]` f32, for logits that masks, biases or penalties change.
    pub workspace: u64,
    /// `[B]` u32, written.
    pub tokens: u64,
    /// `[B]` u32; each goes up by 1.
    pub positions: u64,
    /// `[ring_lines, ring_rows, 48]` u32, such as pinned host memory: a row's records by their number from 0, modulo
    /// `ring_lines`.
    pub ring: u64,
    /// V, at most [`SAMPLE_VOCAB_MOST`].
    pub vocab: u32,
    /// Values from one row of `logits` to the next.
    pub logits_stride: u32,
    /// Lines of `ring`, at least 1.
    pub ring_lines: u32,
    /// Rows of a line of `ring`, at least B.
    pub ring_rows: u32,
}

/// What a request asks for, and how far it is.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SampleRow {
    seed: u64,
    least: u64,
    share: u64,
    temperature: f32,
    repetition: f32,
    frequency: f32,
    presence: f32,
    top_k: u32,
    min_tokens: u32,
    flags: u32,
    top_n: u32,
    output: u32,
    records: u32,
}

/// One choice, as the kernel writes it; complete once the launch has ended.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SampleRecord {
    /// Number of the record among its row's, from 1, modulo 2^32: tells it from an older one in its place.
    pub sequence: u32,
    status: u32,
    token: u32,
    value: f32,
    rank: u32,
    n_top: u32,
    top: [(u32, f32); MAX_LOGPROBS],
}

const _: () = assert!(
    size_of::<DecodeSampleArgs>() == 88
        && offset_of!(DecodeSampleArgs, workspace) == 40
        && offset_of!(DecodeSampleArgs, ring) == 64
        && offset_of!(DecodeSampleArgs, vocab) == 72
        && SAMPLE_ROW_BYTES == 64
        && offset_of!(SampleRow, temperature) == 24
        && offset_of!(SampleRow, top_k) == 40
        && offset_of!(SampleRow, output) == 56
        && 6 + 2 * MAX_LOGPROBS <= SAMPLE_RECORD_WORDS
);

// Bits of `SampleRow::flags`.
const MASKED: u32 = 1;
const BIASED: u32 = 2;
const PENALISED: u32 = 4;
const LOGPROBS: u32 = 8;

/// The launch of [`DECODE_SAMPLE`] over `rows` rows of `vocab` logits on a card of compute capability `major`.x.
pub fn decode_sample_launch(rows: usize, vocab: usize, major: i32) -> Launch {
    // Clusters come with 9.0.
    let blocks = if major >= 9 { 8 } else { 1 };
    Launch {
        grid: [blocks, rows as u32, 1],
        block: 512,
        shared_bytes: 0,
        bytes: (rows * vocab * size_of::<f32>()) as u64,
    }
}

/// What a row's memory has to hold when its request starts. Parts that are `None` may hold anything.
#[derive(Clone, Debug)]
pub struct SampleStart {
    /// The row's parameters.
    pub row: SampleRow,
    /// `[2, ceil(V / 32)]`: bit v % 32 of word v / 32 is set for tokens that may be chosen; the second half counts while
    /// fewer than `min_tokens` stand.
    pub masks: Option<Vec<u32>>,
    /// `[V]`, added to the logits.
    pub bias: Option<Vec<f32>>,
    /// `[V]`: 0, or 1 + times in the output for tokens of prompt and output.
    pub seen: Option<Vec<u32>>,
}

impl SampleStart {
    /// For a request whose prompt and output so far are `prompt` and `output`, in a vocabulary of `vocab_size`. `seed`
    /// is the one in use (`Sampler::seed`), `end_token_ids` are those that `min_tokens` hides, `records` is how many the
    /// row has written. Errors: [`Error::Value`] naming the field of `params`, or the ids that are no tokens.
    pub fn new(
        params: &SamplingParams,
        seed: u64,
        [prompt, output]: [&[u32]; 2],
        end_token_ids: &[u32],
        vocab_size: usize,
        records: u32,
    ) -> Result<Self> {
        params.validate(vocab_size)?;
        for (field, ids) in [("prompt", prompt), ("output", output), ("end_token_ids", end_token_ids)] {
            if let Some(id) = ids.iter().find(|&&id| id as usize >= vocab_size) {
                return Err(Error::value(field, id.to_string(), format!("token ids below {vocab_size}")));
            }
        }
        let masks = masks(params, output.len(), end_token_ids, vocab_size);
        let bias = bias(params, vocab_size);
        let seen = seen(params, prompt, output, vocab_size);
        let flag = |set: bool, bit: u32| if set { bit } else { 0 };
        let row = SampleRow {
            seed,
            least: least_weight(params.min_p),
            share: nucleus_share(params.top_p),
            temperature: params.temperature,
            repetition: params.repetition_penalty,
            frequency: params.frequency_penalty,
            presence: params.presence_penalty,
            // As many as there are is as good as all.
            top_k: usize::try_from(params.top_k).map_or(0, |k| if k < vocab_size { k as u32 } else { 0 }),
            // No output is as long as the largest number.
            min_tokens: u32::try_from(params.min_tokens).unwrap_or(u32::MAX),
            flags: flag(masks.is_some(), MASKED)
                | flag(bias.is_some(), BIASED)
                | flag(seen.is_some(), PENALISED)
                | flag(params.logprobs.is_some(), LOGPROBS),
            top_n: params.logprobs.unwrap_or(0) as u32,
            output: output.len() as u32,
            records,
        };
        Ok(Self { row, masks, bias, seen })
    }
}

fn masks(params: &SamplingParams, output: usize, end_token_ids: &[u32], vocab_size: usize) -> Option<Vec<u32>> {
    let hides_ends = output < params.min_tokens;
    if params.allowed_token_ids.is_none() && params.banned_token_ids.is_empty() && !hides_ends {
        return None;
    }
    let words = vocab_size.div_ceil(32);
    let mut mask = vec![if params.allowed_token_ids.is_some() { 0 } else { u32::MAX }; words];
    for &id in params.allowed_token_ids.iter().flatten() {
        mask[id as usize / 32] |= 1 << (id % 32);
    }
    for &id in &params.banned_token_ids {
        mask[id as usize / 32] &= !(1 << (id % 32));
    }
    mask.extend_from_within(..);
    for &id in end_token_ids.iter().chain(&params.stop_token_ids) {
        mask[words + id as usize / 32] &= !(1 << (id % 32));
    }
    Some(mask)
}

fn bias(params: &SamplingParams, vocab_size: usize) -> Option<Vec<f32>> {
    if params.logit_bias.is_empty() {
        return None;
    }
    let mut bias = vec![0.0; vocab_size];
    for (&id, &value) in &params.logit_bias {
        bias[id as usize] = value;
    }
    Some(bias)
}

fn seen(params: &SamplingParams, prompt: &[u32], output: &[u32], vocab_size: usize) -> Option<Vec<u32>> {
    if (params.repetition_penalty, params.frequency_penalty, params.presence_penalty) == (1.0, 0.0, 0.0) {
        return None;
    }
    let mut seen = vec![0; vocab_size];
    for &id in prompt {
        seen[id as usize] = 1;
    }
    for &id in output {
        let count = &mut seen[id as usize];
        *count = 1 + 1.max(*count);
    }
    Some(seen)
}

impl SampleRow {
    /// As the device holds it.
    pub fn bytes(&self) -> [u8; SAMPLE_ROW_BYTES] {
        let mut bytes = [0; SAMPLE_ROW_BYTES];
        for (to, value) in bytes.chunks_exact_mut(8).zip([self.seed, self.least, self.share]) {
            to.copy_from_slice(&value.to_le_bytes());
        }
        let words = [
            self.temperature.to_bits(),
            self.repetition.to_bits(),
            self.frequency.to_bits(),
            self.presence.to_bits(),
            self.top_k,
            self.min_tokens,
            self.flags,
            self.top_n,
            self.output,
            self.records,
        ];
        for (to, value) in bytes[24..].chunks_exact_mut(4).zip(words) {
            to.copy_from_slice(&value.to_le_bytes());
        }
        bytes
    }
}

impl SampleRecord {
    /// From the ring.
    pub fn new(words: &[u32; SAMPLE_RECORD_WORDS]) -> Self {
        let top = |i: usize| (words[6 + 2 * i], f32::from_bits(words[7 + 2 * i]));
        Self {
            sequence: words[0],
            status: words[1],
            token: words[2],
            value: f32::from_bits(words[3]),
            rank: words[4],
            n_top: words[5],
            top: std::array::from_fn(top),
        }
    }

    /// The choice of output token number `output_tokens` for a request of `params`, or the error of `Sampler::sample`.
    pub fn sampled(&self, params: &SamplingParams, output_tokens: usize) -> Result<Sampled> {
        match self.status {
            0 => {}
            1 => return Err(bad_logit(self.value, self.token)),
            2 => return Err(no_possible_logit()),
            3 => return Err(penalty_overflow(params)),
            4 => return Err(nothing_left(params, output_tokens)),
            status => {
                let what = "reading a sampled token".into();
                return Err(Error::Device { what, why: format!("its status is {status}") });
            }
        }
        let top = self.top.iter().take(self.n_top as usize).zip(1..);
        let logprobs = params.logprobs.map(|_| TokenLogprobs {
            chosen: Logprob { token_id: self.token, logprob: self.value, rank: self.rank as usize },
            top: top.map(|(&(token_id, logprob), rank)| Logprob { token_id, logprob, rank }).collect(),
        });
        Ok(Sampled { token_id: self.token, logprobs })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SEED: u64 = 0x0123_4567_89AB_CDEF;

    fn start(params: &SamplingParams, tokens: [&[u32]; 2]) -> SampleStart {
        SampleStart::new(params, SEED, tokens, &[40, 2], 70, 3).unwrap()
    }

    fn words(row: &SampleRow) -> Vec<u32> {
        row.bytes().as_chunks::<4>().0.iter().map(|&word| u32::from_le_bytes(word)).collect()
    }

    #[test]
    fn a_plain_request_needs_nothing_but_its_row() {
        let start = start(&SamplingParams::default(), [&[1, 2], &[3]]);
        assert!(start.masks.is_none() && start.bias.is_none() && start.seen.is_none());
        let (one, share) = (1f32.to_bits(), (f64::from(0.95f32) * 4_294_967_296.0) as u32);
        let seed = [0x89AB_CDEF, 0x0123_4567];
        assert_eq!(words(&start.row)[..2], seed);
        assert_eq!(words(&start.row)[2..], [1, 0, share, 0, one, one, 0, 0, 20, 0, 0, 0, 1, 3]);
    }

    #[test]
    fn every_field_reaches_the_row() {
        let params = SamplingParams {
            temperature: 0.5,
            top_k: -1,
            top_p: 1.0,
            min_p: 0.25,
            repetition_penalty: 1.5,
            frequency_penalty: -0.5,
            presence_penalty: 2.0,
            logit_bias: [(69, -3.5)].into(),
            banned_token_ids: vec![7],
            min_tokens: 9,
            logprobs: Some(20),
            ..SamplingParams::default()
        };
        let start = start(&params, [&[5, 6, 6], &[6, 8, 8]]);
        let bits = f32::to_bits;
        let expected = [0, 1 << 6, 0, 1, bits(0.5), bits(1.5), bits(-0.5), bits(2.0), 0, 9, 15, 20, 3, 3];
        assert_eq!(words(&start.row)[2..], expected);
        let bias = start.bias.unwrap();
        assert_eq!((bias.len(), bias[69], bias.iter().sum::<f32>()), (70, -3.5, -3.5));
        let seen = start.seen.unwrap();
        assert_eq!((seen.len(), &seen[5..9], seen.iter().sum::<u32>()), (70, &[1, 2, 0, 3][..], 6));
        // A top_k of the whole vocabulary keeps all.
        for (top_k, expected) in [(69, 69), (70, 0), (i64::MAX, 0), (0, 0)] {
            let row =
                SampleStart::new(&SamplingParams { top_k, ..params.clone() }, SEED, [&[]; 2], &[], 70, 0).unwrap().row;
            assert_eq!(row.top_k, expected);
        }
    }

    #[test]
    fn masks_are_allowed_less_banned_and_later_less_ends() {
        let params = SamplingParams {
            allowed_token_ids: Some(vec![0, 33, 40, 69, 31]),
            banned_token_ids: vec![33, 1],
            stop_token_ids: vec![69],
            ..SamplingParams::default()
        };
        let late = start(&params, [&[], &[]]).masks.unwrap();
        assert_eq!(late[..3], [1 | 1 << 31, 1 << 8, 1 << 5]);
        let early = SamplingParams { min_tokens: 2, ..params };
        let masks = start(&early, [&[], &[1]]).masks.unwrap();
        assert_eq!(masks, [1 | 1 << 31, 1 << 8, 1 << 5, 1 | 1 << 31, 0, 0]);
        let ends_only = SamplingParams { min_tokens: 2, ..SamplingParams::default() };
        let masks = start(&ends_only, [&[], &[1]]).masks.unwrap();
        assert_eq!(masks, [u32::MAX, u32::MAX, u32::MAX, !4, !(1 << 8), u32::MAX]);
        // Enough tokens stand.
        assert!(start(&ends_only, [&[], &[1, 1]]).masks.is_none());
    }

    #[test]
    fn ids_outside_the_vocabulary_are_refused_by_name() {
        let none = &[][..];
        for (field, tokens, end_token_ids) in [
            ("prompt", [&[70][..], none], none),
            ("output", [none, &[1, 71]], none),
            ("end_token_ids", [none, none], &[99]),
        ] {
            let error = SampleStart::new(&SamplingParams::default(), SEED, tokens, end_token_ids, 70, 0).unwrap_err();
            assert!(error.to_string().starts_with(&format!("{field}: expected token ids below 70")), "{error}");
        }
        let params = SamplingParams { top_p: 0.0, ..SamplingParams::default() };
        let error = SampleStart::new(&params, SEED, [&[]; 2], &[], 70, 0).unwrap_err();
        assert!(error.to_string().starts_with("top_p"), "{error}");
    }

    #[test]
    fn records_become_tokens_or_the_samplers_errors() {
        let mut words = [0xFFFF_FFFF; SAMPLE_RECORD_WORDS];
        words[..10].copy_from_slice(&[
            7,
            0,
            5,
            (-1.5f32).to_bits(),
            3,
            2,
            9,
            (-0.5f32).to_bits(),
            8,
            (-1f32).to_bits(),
        ]);
        let record = SampleRecord::new(&words);
        assert_eq!(record.sequence, 7);
        let plain = SamplingParams::default();
        assert_eq!(record.sampled(&plain, 0).unwrap(), Sampled { token_id: 5, logprobs: None });
        let params = SamplingParams { logprobs: Some(2), min_tokens: 4, ..plain };
        let logprobs = record.sampled(&params, 0).unwrap().logprobs.unwrap();
        assert_eq!(logprobs.chosen, Logprob { token_id: 5, logprob: -1.5, rank: 3 });
        let expected =
            [Logprob { token_id: 9, logprob: -0.5, rank: 1 }, Logprob { token_id: 8, logprob: -1.0, rank: 2 }];
        assert_eq!(logprobs.top, expected);
        for (status, text) in [
            (1, "logits: expected numbers below infinity, found -1.5 for token 5"),
            (2, "logits: expected at least one token that is possible, found none above minus infinity"),
            (3, "repetition_penalty: expected one under which logits stay finite, found 1"),
            (4, "min_tokens: expected at least one that the model gives a chance, found no token left to choose"),
            (0xFFFF_FFFF, "reading a sampled token failed: its status is 4294967295"),
        ] {
            words[1] = status;
            assert_eq!(SampleRecord::new(&words).sampled(&params, 3).unwrap_err().to_string(), text);
        }
    }

    #[test]
    fn eight_blocks_share_a_row_where_there_are_clusters() {
        let launch = decode_sample_launch(8, 150_144, 9);
        assert_eq!((launch.grid, launch.block, launch.bytes), ([8, 8, 1], 512, 8 * 150_144 * 4));
        assert_eq!(decode_sample_launch(2, 8193, 8).grid, [1, 2, 1]);
    }
}
