//! `Model`: a loaded checkpoint and its methods.

use std::{
    path::{Path, PathBuf},
    process,
    sync::{Arc, Mutex, PoisonError, atomic::Ordering},
    time::Instant,
};

use numpy::{IntoPyArray, PyArray1, ndarray::Array2};
use pyo3::{
    IntoPyObjectExt,
    exceptions::PyTypeError,
    prelude::*,
    types::{PyBytes, PyDict, PyString, PyTuple},
};

use super::{
    device_array::DeviceArray,
    files::{self, to_python},
    params::{SamplingParams, argument, callback, optional},
    stream::{Progress, Request, Stream},
    wait,
};
use crate::{
    cancel::Cancel,
    checkpoint::DType,
    config::FlintConfig,
    cpu::Precision,
    engine::{Engine, LoadOptions, Synthetic},
    error::{Error, Result},
    tokenizer::ControlTokens,
};

/// Neither the engine's threads nor its locks survive a fork: an error says so, where a call would hang.
pub fn check_process(opened_in: u32) -> Result<()> {
    if process::id() == opened_in {
        return Ok(());
    }
    let why = format!("it was opened in process {opened_in}, of which this is a fork; open it here anew");
    Err(Error::Unavailable { what: "this object".into(), why })
}

/// A Flint, ready to run.
#[pyclass(frozen, subclass, module = "flint_rs._core")]
pub struct Model {
    engine: Mutex<Option<Arc<Engine>>>,
    closing: Cancel,
    process: u32,
}

impl Model {
    fn engine(&self) -> Result<Arc<Engine>> {
        check_process(self.process)?;
        self.engine.lock().unwrap_or_else(PoisonError::into_inner).clone().ok_or(Error::Closed)
    }

    /// Runs `work` where Ctrl-C and `close` reach it.
    fn run<T: Send + 'static>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&Arc<Engine>, &Cancel) -> Result<T> + Send + 'static,
    ) -> PyResult<T> {
        self.run_showing(py, || Ok(()), work)
    }

    /// The same, with `poll` called on this thread about 20 times a second.
    fn run_showing<T: Send + 'static>(
        &self,
        py: Python<'_>,
        poll: impl FnMut() -> PyResult<()>,
        work: impl FnOnce(&Arc<Engine>, &Cancel) -> Result<T> + Send + 'static,
    ) -> PyResult<T> {
        let engine = self.engine()?;
        let (cancel, closing) = (self.closing.child(), self.closing.clone());
        let inner = cancel.clone();
        wait::run(py, &cancel, poll, move || {
            work(&engine, &inner).map_err(|error| match error {
                Error::Cancelled if closing.is_cancelled() => Error::Closed,
                error => error,
            })
        })
    }
}

#[pymethods]
impl Model {
    /// `source` is a path, or (seed, dimensions as JSON, format, whether those are a whole config.json) of a synthetic model.
    #[new]
    #[pyo3(signature = (source, device, dtype, threads, max_sequences, context_tokens, progress))]
    #[allow(clippy::too_many_arguments, reason = "as Python calls it")]
    fn new(
        py: Python<'_>,
        source: &Bound<'_, PyAny>,
        device: &Bound<'_, PyAny>,
        dtype: &Bound<'_, PyAny>,
        threads: Option<&Bound<'_, PyAny>>,
        max_sequences: &Bound<'_, PyAny>,
        context_tokens: Option<&Bound<'_, PyAny>>,
        progress: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        let source = Source::new(source)?;
        let options = LoadOptions {
            device: argument::<String>("device", device, "a string")?.parse()?,
            precision: precision(&argument::<String>("dtype", dtype, "a string")?)?,
            threads: optional("threads", threads, "None or an integer from 1 to the number of cores")?,
            max_sequences: argument("max_sequences", max_sequences, "an integer from 1 to 256")?,
            context_tokens: optional("context_tokens", context_tokens, CONTEXT_TOKENS)?,
        };
        let (cancel, state) = (Cancel::default(), files::Progress::default());
        let (inner_cancel, inner_state) = (cancel.clone(), state.clone());
        let engine = wait::run(
            py,
            &cancel,
            || state.show(progress),
            move || {
                let mut progress = |done, total| inner_state.set(done, total);
                match source {
                    Source::File(path) => Engine::load(&path, options, &mut progress, &inner_cancel),
                    Source::Synthetic(model) => Engine::synthetic(model, options, &mut progress, &inner_cancel),
                }
            },
        )?;
        Ok(Self { engine: Mutex::new(Some(engine)), closing: Cancel::default(), process: process::id() })
    }

    /// Generates after a prompt (text or token ids), or after each of a list of prompts.
    #[pyo3(signature = (prompt, params=None, progress=None, **options))]
    fn generate<'py>(
        &self,
        py: Python<'py>,
        prompt: &Bound<'py, PyAny>,
        params: Option<&Bound<'py, PyAny>>,
        progress: Option<&Bound<'py, PyAny>>,
        options: Option<&Bound<'py, PyDict>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let params = SamplingParams::of_request(params, options)?;
        let (prompts, many) = prompts(prompt)?;
        let progress = Progress::new(callback("progress", progress)?);
        let (read, total) = (progress.read.clone(), Arc::clone(&progress.total));
        let results = self.run_showing(
            py,
            || progress.show(py),
            move |engine, cancel| {
                // All of them are checked before the first one costs time.
                let prompts = prompts.into_iter().map(|prompt| prompt.tokens(engine)).collect::<Result<Vec<_>>>()?;
                total.store(prompts.iter().map(Vec::len).sum(), Ordering::Relaxed);
                let start = |tokens| Request::start(engine, tokens, &params, &read, cancel, Instant::now());
                if engine.runs_together() {
                    let requests = prompts.into_iter().map(start).collect::<Result<Vec<_>>>()?;
                    requests.into_iter().map(|request| request.finish(engine)).collect()
                } else {
                    prompts.into_iter().map(|tokens| start(tokens)?.finish(engine)).collect::<Result<Vec<_>>>()
                }
            },
        )?;
        if many {
            return results.into_bound_py_any(py);
        }
        let one = results.into_iter().next().expect("one prompt has one result");
        one.into_bound_py_any(py)
    }

    /// Starts to generate, and returns an iterator of events, one a token.
    #[pyo3(signature = (prompt, params=None, progress=None, **options))]
    fn stream(
        &self,
        py: Python<'_>,
        prompt: &Bound<'_, PyAny>,
        params: Option<&Bound<'_, PyAny>>,
        progress: Option<&Bound<'_, PyAny>>,
        options: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Stream> {
        let params = SamplingParams::of_request(params, options)?;
        let (mut prompts, many) = prompts(prompt)?;
        let (Some(prompt), false) = (prompts.pop(), many) else {
            return Err(Error::value("prompt", "a list of prompts", "one prompt, to stream").into());
        };
        let (engine, start) = (self.engine()?, Instant::now());
        let (cancel, progress) = (self.closing.child(), Progress::new(callback("progress", progress)?));
        let (read, total) = (&progress.read, &progress.total);
        let request = py.detach(|| {
            let tokens = prompt.tokens(&engine)?;
            total.store(tokens.len(), Ordering::Relaxed);
            Request::start(&engine, tokens, &params, read, &cancel, start)
        })?;
        Stream::start(engine, request, progress, cancel, self.closing.clone())
    }

    /// Token ids of a text; control tokens spelled in it stay text unless `control`.
    #[pyo3(signature = (text, control=None), text_signature = "($self, text, control=False)")]
    fn tokenize(
        &self,
        py: Python<'_>,
        text: &Bound<'_, PyAny>,
        control: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Vec<u32>> {
        let text: String = argument("text", text, "a string")?;
        let control = match control.map(|control| argument("control", control, "True or False")).transpose()? {
            Some(true) => ControlTokens::Parse,
            Some(false) | None => ControlTokens::AsText,
        };
        self.run(py, move |engine, _| engine.tokenizer()?.encode(&text, control))
    }

    /// Text of token ids, control tokens included.
    fn detokenize(&self, py: Python<'_>, token_ids: &Bound<'_, PyAny>) -> PyResult<String> {
        let ids = token_ids_argument("token_ids", token_ids)?;
        self.run(py, move |engine, _| engine.tokenizer()?.decode(&ids, false))
    }

    /// Logits after each token, `[T, V]` of float32: a NumPy array, or one in the GPU's memory.
    #[pyo3(signature = (token_ids, on_device=None), text_signature = "($self, token_ids, on_device=False)")]
    fn logits<'py>(
        &self,
        py: Python<'py>,
        token_ids: &Bound<'py, PyAny>,
        on_device: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let ids = token_ids_argument("token_ids", token_ids)?;
        if on_device.map_or(Ok(false), |value| argument("on_device", value, "True or False"))? {
            let logits = self.run(py, move |engine, cancel| engine.logits_on_device(&ids, cancel))?;
            return DeviceArray::new(logits).into_bound_py_any(py);
        }
        let logits = self.run(py, move |engine, cancel| {
            let logits = engine.logits(&ids, cancel)?;
            let shape = (ids.len(), logits.len() / ids.len());
            Ok(Array2::from_shape_vec(shape, logits).expect("the engine returns whole rows"))
        })?;
        import_numpy(py)?;
        Ok(logits.into_pyarray(py).into_any())
    }

    /// Natural log-probability of each token after the first, given those before it, `[T - 1]`.
    fn score<'py>(&self, py: Python<'py>, token_ids: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyArray1<f32>>> {
        let ids = token_ids_argument("token_ids", token_ids)?;
        let scores = self.run(py, move |engine, cancel| {
            let scores = engine.score(&ids, 0, cancel)?;
            Ok(scores.into_iter().map(|score| score.chosen.logprob).collect::<Vec<_>>())
        })?;
        import_numpy(py)?;
        Ok(scores.into_pyarray(py))
    }

    /// The dimensions, and the kind of each layer.
    #[getter]
    fn config<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        to_python(py, self.engine()?.config())
    }

    /// Bytes of memory, by what holds them.
    #[getter]
    fn memory<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let memory = self.engine()?.memory();
        let dict = PyDict::new(py);
        dict.set_item("weights_bytes", memory.weights_bytes)?;
        dict.set_item("kv_max_bytes", memory.kv_max_bytes)?;
        dict.set_item("workspace_bytes", memory.workspace_bytes)?;
        Ok(dict)
    }

    /// Ids that end a turn, ascending.
    #[getter]
    fn end_token_ids(&self) -> PyResult<Vec<u32>> {
        Ok(self.engine()?.end_token_ids().to_vec())
    }

    /// The jinja source that renders messages, if the checkpoint has one.
    #[getter]
    fn chat_template(&self) -> PyResult<Option<String>> {
        let engine = self.engine()?;
        Ok(engine.tokenizer().ok().and_then(|tokenizer| tokenizer.chat_template().map(str::to_owned)))
    }

    /// Where the checkpoint was read from; None for a synthetic model.
    #[getter]
    fn path(&self) -> PyResult<Option<PathBuf>> {
        Ok(self.engine()?.path().map(Path::to_path_buf))
    }

    /// What computes, and why when that was left to us.
    #[getter]
    fn device(&self) -> PyResult<String> {
        Ok(self.engine()?.device().to_owned())
    }

    /// Most tokens of a sequence.
    #[getter]
    fn context_tokens(&self) -> PyResult<usize> {
        Ok(self.engine()?.context_tokens())
    }

    /// Ends all work and lets go of the checkpoint.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        check_process(self.process)?;
        self.closing.cancel();
        let engine = self.engine.lock().unwrap_or_else(PoisonError::into_inner).take();
        // A GPU's thread ends its step first.
        py.detach(|| drop(engine));
        Ok(())
    }

    fn __enter__(slf: PyRef<'_, Self>) -> PyResult<PyRef<'_, Self>> {
        slf.engine()?;
        Ok(slf)
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, PyTuple>) -> PyResult<()> {
        self.close(py)
    }

    fn __repr__(&self) -> String {
        match self.engine() {
            Ok(engine) => match engine.path() {
                Some(path) => format!("<Flint {}>", path.display()),
                None => "<Flint synthetic>".into(),
            },
            Err(error) => format!("<Flint: {error}>"),
        }
    }
}

/// What errors say of `context_tokens` before a model is known.
pub const CONTEXT_TOKENS: &str = "None or an integer from 1 to the model's context length";

/// What is wrong with a request to a synthetic model on the CPU or a GPU, before it is made: for the command line.
#[pyfunction]
pub fn check_synthetic_request(
    source: &Bound<'_, PyAny>,
    context_tokens: Option<&Bound<'_, PyAny>>,
    prompt: &Bound<'_, PyAny>,
    params: &Bound<'_, PyAny>,
) -> PyResult<()> {
    let Source::Synthetic(model) = Source::new(source)? else {
        return Err(Error::value("source", "a path", "a synthetic model").into());
    };
    let context_tokens = optional("context_tokens", context_tokens, CONTEXT_TOKENS)?;
    let options = LoadOptions { context_tokens, ..LoadOptions::default() };
    let params = SamplingParams::of_request(Some(params), None)?;
    Ok(model.check_request(options, &token_ids_argument("prompt", prompt)?, &params)?)
}

fn precision(dtype: &str) -> Result<Precision> {
    match dtype {
        "bfloat16" => Ok(Precision::Bfloat16),
        "float32" => Ok(Precision::Float32),
        _ => Err(Error::value("dtype", format!("{dtype:?}"), "bfloat16 or float32")),
    }
}

/// What a model is made from.
enum Source {
    File(PathBuf),
    Synthetic(Synthetic),
}

impl Source {
    fn new(source: &Bound<'_, PyAny>) -> PyResult<Self> {
        let Ok(parts) = source.cast::<PyTuple>() else { return Ok(Self::File(argument("path", source, "a path")?)) };
        let seed = argument("seed", &parts.get_item(0)?, "an integer from 0 to 2**64 - 1")?;
        let whole_file = argument("whole_file", &parts.get_item(3)?, "True or False")?;
        let config = FlintConfig::flint_with(&argument::<String>("dims", &parts.get_item(1)?, "JSON")?, whole_file)?;
        let dtype = match argument::<String>("format", &parts.get_item(2)?, "a string")?.as_str() {
            "nvfp4" => DType::Nvfp4,
            "bf16" => DType::Bf16,
            other => return Err(Error::value("format", format!("{other:?}"), "nvfp4 or bf16").into()),
        };
        if dtype == DType::Nvfp4 {
            config.check_nvfp4_dims()?;
        }
        Ok(Self::Synthetic(Synthetic { config, seed, dtype }))
    }
}

/// One prompt of a request, under the name that errors call it by.
struct Prompt {
    name: String,
    content: Content,
}

enum Content {
    Text(String),
    Tokens(Vec<u32>),
}

impl Prompt {
    fn new(name: String, value: &Bound<'_, PyAny>) -> PyResult<Self> {
        let content = match value.cast::<PyString>() {
            Ok(_) => Content::Text(argument(&name, value, "a string")?),
            Err(_) => Content::Tokens(token_ids_argument(&name, value)?),
        };
        Ok(Self { name, content })
    }

    /// Its checked token ids. Control tokens spelled in a text are text.
    fn tokens(self, engine: &Engine) -> Result<Vec<u32>> {
        let tokens = match self.content {
            Content::Text(text) => engine.tokenizer()?.encode(&text, ControlTokens::AsText)?,
            Content::Tokens(tokens) => tokens,
        };
        engine.check_prompt(&self.name, &tokens)?;
        Ok(tokens)
    }
}

/// The prompts of a request, and whether they came as a list of prompts. A list of integers is one prompt.
fn prompts(value: &Bound<'_, PyAny>) -> PyResult<(Vec<Prompt>, bool)> {
    if value.is_instance_of::<PyString>() {
        return Ok((vec![Prompt::new("prompt".into(), value)?], false));
    }
    let accepted = "a string, a list of strings, a list of token ids, or a list of such lists";
    let items: Vec<Bound<'_, PyAny>> = argument("prompt", value, accepted)?;
    match items.first() {
        None => Err(Error::value("prompt", "an empty list", accepted).into()),
        Some(first) if first.extract::<i64>().is_ok() => Ok((vec![Prompt::new("prompt".into(), value)?], false)),
        Some(_) => {
            let named = items.iter().enumerate().map(|(i, item)| Prompt::new(format!("prompt[{i}]"), item));
            Ok((named.collect::<PyResult<_>>()?, true))
        }
    }
}

/// What an entry of a list of token ids may be before a model's vocabulary is known.
const TOKEN_ID: &str = "a token id from 0 to 2**32 - 1";

/// A sequence of token ids; the error names the entry that is none.
fn token_ids_argument(name: &str, value: &Bound<'_, PyAny>) -> PyResult<Vec<u32>> {
    let accepted = "a list of token ids";
    if value.is_instance_of::<PyBytes>() {
        // A sequence of integers too, but surely meant as text.
        return Err(PyTypeError::new_err(format!("{name}: expected {accepted}, found bytes")));
    }
    let items: Vec<Bound<'_, PyAny>> = argument(name, value, accepted)?;
    items.iter().enumerate().map(|(i, item)| argument(&format!("{name}[{i}]"), item, TOKEN_ID)).collect()
}

/// The first array imports NumPy, and panics when that fails or is interrupted: here it is an exception, and nothing is left
/// to fail after it.
fn import_numpy(py: Python<'_>) -> PyResult<()> {
    py.import("numpy").map(drop)
}
