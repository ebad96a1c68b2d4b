//! `Model`: a loaded checkpoint and its methods.

use std::{
    path::PathBuf,
    process,
    sync::{Arc, Mutex, PoisonError},
    time::Instant,
};

use numpy::{IntoPyArray, PyArray1, PyArray2, ndarray::Array2};
use pyo3::{
    IntoPyObjectExt,
    exceptions::PyTypeError,
    prelude::*,
    types::{PyBytes, PyDict, PyString, PyTuple},
};

use super::{
    files::{Progress, to_python},
    params::{SamplingParams, argument},
    results,
    stream::{Request, Stream},
    wait,
};
use crate::{
    cancel::Cancel,
    cpu::{Path, Precision},
    engine::{Engine, LoadOptions},
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
        let engine = self.engine()?;
        let (cancel, closing) = (self.closing.child(), self.closing.clone());
        let inner = cancel.clone();
        wait::run(
            py,
            &cancel,
            || Ok(()),
            move || {
                work(&engine, &inner).map_err(|error| match error {
                    Error::Cancelled if closing.is_cancelled() => Error::Closed,
                    error => error,
                })
            },
        )
    }
}

#[pymethods]
impl Model {
    #[new]
    #[pyo3(signature = (path, device, dtype, threads, progress))]
    fn new(
        py: Python<'_>,
        path: &Bound<'_, PyAny>,
        device: &Bound<'_, PyAny>,
        dtype: &Bound<'_, PyAny>,
        threads: Option<&Bound<'_, PyAny>>,
        progress: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        let path: PathBuf = argument("path", path, "a path")?;
        let options = load_options(
            &argument::<String>("device", device, "a string")?,
            &argument::<String>("dtype", dtype, "a string")?,
            threads.map(|threads| argument("threads", threads, "None or an integer of at least 1")).transpose()?,
        )?;
        let (cancel, state) = (Cancel::default(), Progress::default());
        let (inner_cancel, inner_state) = (cancel.clone(), state.clone());
        let engine = wait::run(
            py,
            &cancel,
            || state.show(progress),
            move || Engine::load(&path, options, &mut |done, total| inner_state.set(done, total), &inner_cancel),
        )?;
        Ok(Self { engine: Mutex::new(Some(engine)), closing: Cancel::default(), process: process::id() })
    }

    /// Generates after a prompt (text or token ids), or after each of a list of prompts.
    #[pyo3(signature = (prompt, params=None, **options))]
    fn generate<'py>(
        &self,
        py: Python<'py>,
        prompt: &Bound<'py, PyAny>,
        params: Option<&Bound<'py, PyAny>>,
        options: Option<&Bound<'py, PyDict>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let params = SamplingParams::of_request(params, options)?;
        let (prompts, many) = prompts(prompt)?;
        let results = self.run(py, move |engine, cancel| {
            // All of them are checked before the first one costs time.
            let prompts = prompts.into_iter().map(|prompt| prompt.tokens(engine)).collect::<Result<Vec<_>>>()?;
            let mut results = Vec::with_capacity(prompts.len());
            for tokens in prompts {
                let (prompt_tokens, start) = (tokens.len(), Instant::now());
                let generation = engine.generate(tokens, &params, cancel.clone())?;
                let mut events = Vec::new();
                let (last, summary) = Request { generation, prompt_tokens, start }.run(engine, |event| {
                    events.push(event.into());
                    true
                })?;
                events.push(last.into());
                results.push(results::Result::new(events, summary));
            }
            Ok(results)
        })?;
        if many {
            return results.into_bound_py_any(py);
        }
        let one = results.into_iter().next().expect("one prompt has one result");
        one.into_bound_py_any(py)
    }

    /// Starts to generate, and returns an iterator of events, one a token.
    #[pyo3(signature = (prompt, params=None, **options))]
    fn stream(
        &self,
        py: Python<'_>,
        prompt: &Bound<'_, PyAny>,
        params: Option<&Bound<'_, PyAny>>,
        options: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Stream> {
        let params = SamplingParams::of_request(params, options)?;
        let (mut prompts, many) = prompts(prompt)?;
        let (Some(prompt), false) = (prompts.pop(), many) else {
            return Err(Error::value("prompt", "a list of prompts", "one prompt, to stream").into());
        };
        let (engine, start) = (self.engine()?, Instant::now());
        let cancel = self.closing.child();
        let request = py.detach(|| {
            let tokens = prompt.tokens(&engine)?;
            let prompt_tokens = tokens.len();
            let generation = engine.generate(tokens, &params, cancel.clone())?;
            Ok::<_, Error>(Request { generation, prompt_tokens, start })
        })?;
        Stream::start(engine, request, cancel, self.closing.clone())
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
        self.run(py, move |engine, _| engine.tokenizer().encode(&text, control))
    }

    /// Text of token ids, control tokens included.
    fn detokenize(&self, py: Python<'_>, token_ids: &Bound<'_, PyAny>) -> PyResult<String> {
        let ids = token_ids_argument("token_ids", token_ids)?;
        self.run(py, move |engine, _| engine.tokenizer().decode(&ids, false))
    }

    /// Logits after each token, a NumPy array `[T, V]` of float32.
    fn logits<'py>(&self, py: Python<'py>, token_ids: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyArray2<f32>>> {
        let ids = token_ids_argument("token_ids", token_ids)?;
        let logits = self.run(py, move |engine, cancel| {
            let logits = engine.logits(&ids, cancel)?;
            let shape = (ids.len(), logits.len() / ids.len());
            Ok(Array2::from_shape_vec(shape, logits).expect("the engine returns whole rows"))
        })?;
        Ok(logits.into_pyarray(py))
    }

    /// Natural log-probability of each token after the first, given those before it, `[T - 1]`.
    fn score<'py>(&self, py: Python<'py>, token_ids: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyArray1<f32>>> {
        let ids = token_ids_argument("token_ids", token_ids)?;
        let scores = self.run(py, move |engine, cancel| {
            let scores = engine.score(&ids, 0, cancel)?;
            Ok(scores.into_iter().map(|score| score.chosen.logprob).collect::<Vec<_>>())
        })?;
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
        Ok(self.engine()?.tokenizer().end_token_ids().to_vec())
    }

    /// The jinja source that renders messages, if the checkpoint has one.
    #[getter]
    fn chat_template(&self) -> PyResult<Option<String>> {
        Ok(self.engine()?.tokenizer().chat_template().map(str::to_owned))
    }

    /// Where the checkpoint was read from.
    #[getter]
    fn path(&self) -> PyResult<PathBuf> {
        Ok(self.engine()?.path().to_path_buf())
    }

    /// Ends all work and lets go of the checkpoint.
    fn close(&self) -> PyResult<()> {
        check_process(self.process)?;
        self.closing.cancel();
        self.engine.lock().unwrap_or_else(PoisonError::into_inner).take();
        Ok(())
    }

    fn __enter__(slf: PyRef<'_, Self>) -> PyResult<PyRef<'_, Self>> {
        slf.engine()?;
        Ok(slf)
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, _exception: &Bound<'_, PyTuple>) -> PyResult<()> {
        self.close()
    }

    fn __repr__(&self) -> String {
        match self.engine() {
            Ok(engine) => format!("<Flint {}>", engine.path().display()),
            Err(error) => format!("<Flint: {error}>"),
        }
    }
}

fn load_options(device: &str, dtype: &str, threads: Option<usize>) -> Result<LoadOptions> {
    let path = match device {
        "auto" | "cpu" => Path::Fast,
        "reference" => Path::Reference,
        "cuda" => {
            let why = "this version computes on the CPU; accepted are auto, cpu and reference".into();
            return Err(Error::Unavailable { what: "device cuda".into(), why });
        }
        _ => return Err(Error::value("device", format!("{device:?}"), "auto, cpu, reference or cuda")),
    };
    let precision = match dtype {
        "bfloat16" => Precision::Bfloat16,
        "float32" => Precision::Float32,
        _ => return Err(Error::value("dtype", format!("{dtype:?}"), "bfloat16 or float32")),
    };
    match threads {
        Some(n) if path == Path::Reference => {
            Err(Error::value("threads", n.to_string(), "None with device reference, which has one thread"))
        }
        _ => Ok(LoadOptions { path, precision, threads }),
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
            Ok(text) => Content::Text(text.to_str()?.to_owned()),
            Err(_) => Content::Tokens(token_ids_argument(&name, value)?),
        };
        Ok(Self { name, content })
    }

    /// Its checked token ids. Control tokens spelled in a text are text.
    fn tokens(self, engine: &Engine) -> Result<Vec<u32>> {
        let tokens = match self.content {
            Content::Text(text) => engine.tokenizer().encode(&text, ControlTokens::AsText)?,
            Content::Tokens(tokens) => tokens,
        };
        engine.check_tokens(&self.name, &tokens)?;
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

/// A sequence of token ids; the error names the entry that is none.
fn token_ids_argument(name: &str, value: &Bound<'_, PyAny>) -> PyResult<Vec<u32>> {
    let accepted = "a list of token ids";
    if value.is_instance_of::<PyBytes>() {
        // A sequence of integers too, but surely meant as text.
        return Err(PyTypeError::new_err(format!("{name}: expected {accepted}, found bytes")));
    }
    let items: Vec<Bound<'_, PyAny>> = argument(name, value, accepted)?;
    items.iter().enumerate().map(|(i, item)| argument(&format!("{name}[{i}]"), item, "a token id")).collect()
}
