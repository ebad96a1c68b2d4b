//! What comes back: plain values, read-only in Python.

use std::time::Duration;

use pyo3::{IntoPyObjectExt, prelude::*};

use crate::{engine, sampling};

/// A frozen class with these fields, equality and a `repr`.
macro_rules! record {
    ($(#[$doc:meta])* $name:ident { $($(#[$field_doc:meta])* $field:ident: $type:ty,)* }) => {
        $(#[$doc])*
        #[pyclass(frozen, eq, get_all, module = "flint_rs")]
        #[derive(Clone, PartialEq)]
        // `Logprob.logprob` is what it is.
        #[allow(clippy::struct_field_names)]
        pub struct $name {
            $($(#[$field_doc])* pub $field: $type,)*
        }

        #[pymethods]
        impl $name {
            fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
                let fields = [$((stringify!($field), self.$field.clone().into_bound_py_any(py)?.repr()?.to_string())),*];
                let fields = fields.map(|(name, value)| format!("{name}={value}"));
                Ok(format!("{}({})", stringify!($name), fields.join(", ")))
            }
        }
    };
}

record! {
    /// A token's log-probability under the raw distribution of the model.
    Logprob {
        /// The token.
        token_id: u32,
        /// Natural logarithm of its probability.
        logprob: f32,
        /// 1 for the most likely token.
        rank: usize,
    }
}

record! {
    /// Log-probabilities at one position.
    TokenLogprobs {
        /// The token that stands there.
        chosen: Logprob,
        /// The most likely tokens, best first.
        top: Vec<Logprob>,
    }
}

record! {
    /// One generated token of a stream.
    Event {
        /// The token.
        token_id: u32,
        /// The text that became certain with it; may be empty.
        text: String,
        /// If the request asked for log-probabilities.
        logprobs: Option<TokenLogprobs>,
        /// `"stop"` or `"length"` on the last event.
        finish_reason: Option<&'static str>,
    }
}

record! {
    /// Token counts.
    Usage {
        /// Tokens of the prompt.
        prompt_tokens: usize,
        /// Tokens generated, an end token included.
        completion_tokens: usize,
    }
}

record! {
    /// Where the time went, in seconds.
    Timings {
        /// Loading the model, once.
        load: f64,
        /// Reading the prompt, up to the first token.
        prefill: f64,
        /// All tokens after the first.
        decode: f64,
        /// From the call to the first token.
        time_to_first_token: f64,
        /// Tokens after the first, by `decode`; `None` when there was only one.
        tokens_per_second: Option<f64>,
    }
}

record! {
    /// A finished generation.
    Result {
        /// The generated text.
        text: String,
        /// The generated tokens.
        token_ids: Vec<u32>,
        /// `"stop"` or `"length"`.
        finish_reason: &'static str,
        /// Token counts.
        usage: Usage,
        /// One entry a generated token, if the request asked.
        logprobs: Option<Vec<TokenLogprobs>>,
        /// One entry a prompt token after the first, if the request asked.
        prompt_logprobs: Option<Vec<TokenLogprobs>>,
        /// The seed in use: the request's own, or the one that was drawn.
        seed: u64,
        /// Where the time went.
        timings: Timings,
    }
}

impl From<sampling::Logprob> for Logprob {
    fn from(from: sampling::Logprob) -> Self {
        Self { token_id: from.token_id, logprob: from.logprob, rank: from.rank }
    }
}

impl From<sampling::TokenLogprobs> for TokenLogprobs {
    fn from(from: sampling::TokenLogprobs) -> Self {
        Self { chosen: from.chosen.into(), top: from.top.into_iter().map(Into::into).collect() }
    }
}

impl From<engine::Event> for Event {
    fn from(from: engine::Event) -> Self {
        let finish_reason = from.finish_reason.map(|reason| match reason {
            engine::FinishReason::Stop => "stop",
            engine::FinishReason::Length => "length",
        });
        Self { token_id: from.token_id, text: from.text, logprobs: from.logprobs.map(Into::into), finish_reason }
    }
}

/// What is known about a generation beside its events, once it has ended.
pub struct Summary {
    pub prompt_tokens: usize,
    pub prompt_logprobs: Option<Vec<sampling::TokenLogprobs>>,
    pub seed: u64,
    pub load: Duration,
    pub prefill: Duration,
    pub decode: Duration,
    pub time_to_first_token: Duration,
}

impl Result {
    /// Of all events of a generation, the last of which has a finish reason.
    pub fn new(events: Vec<Event>, summary: Summary) -> Self {
        let completion_tokens = events.len();
        let decode = summary.decode.as_secs_f64();
        Self {
            text: events.iter().map(|event| event.text.as_str()).collect(),
            token_ids: events.iter().map(|event| event.token_id).collect(),
            finish_reason: events.iter().find_map(|event| event.finish_reason).expect("the generation has ended"),
            usage: Usage { prompt_tokens: summary.prompt_tokens, completion_tokens },
            // Either every event has them or none.
            logprobs: events.into_iter().map(|event| event.logprobs).collect(),
            prompt_logprobs: summary.prompt_logprobs.map(|all| all.into_iter().map(Into::into).collect()),
            seed: summary.seed,
            timings: Timings {
                load: summary.load.as_secs_f64(),
                prefill: summary.prefill.as_secs_f64(),
                decode,
                time_to_first_token: summary.time_to_first_token.as_secs_f64(),
                tokens_per_second: (completion_tokens > 1).then(|| (completion_tokens - 1) as f64 / decode),
            },
        }
    }
}
