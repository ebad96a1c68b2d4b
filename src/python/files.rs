//! The tools that work on files alone.

use std::{
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use pyo3::prelude::*;
use serde::Serialize;

use super::{
    model::CONTEXT_TOKENS,
    params::{argument, callback, optional},
    wait,
};
use crate::{
    cancel::Cancel,
    convert::{ConvertOptions, WeightType},
    error::Error,
    inspect::Inspection,
};

/// What a checkpoint holds, as dicts and lists.
#[pyfunction]
pub fn inspect<'py>(py: Python<'py>, path: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
    to_python(py, &read_header(py, path)?)
}

/// The same for a person.
#[pyfunction]
pub fn describe(py: Python<'_>, path: &Bound<'_, PyAny>) -> PyResult<String> {
    Ok(read_header(py, path)?.to_string())
}

/// What the GPU would do with a checkpoint, for a person.
#[pyfunction]
#[pyo3(
    signature = (path, sequences=None, context_tokens=None),
    text_signature = "(path, sequences=1, context_tokens=None)",
)]
pub fn plan(
    py: Python<'_>,
    path: &Bound<'_, PyAny>,
    sequences: Option<&Bound<'_, PyAny>>,
    context_tokens: Option<&Bound<'_, PyAny>>,
) -> PyResult<String> {
    let path: PathBuf = argument("path", path, "a path")?;
    let sequences = sequences.map_or(Ok(1), |value| argument("sequences", value, "an integer from 1 to 256"))?;
    let context_tokens = optional("context_tokens", context_tokens, CONTEXT_TOKENS)?;
    let work = move || Ok(crate::plan::of_file(&path, sequences, context_tokens)?.to_string());
    wait::run(py, &Cancel::default(), || Ok(()), work)
}

fn read_header(py: Python<'_>, path: &Bound<'_, PyAny>) -> PyResult<Inspection> {
    let path: PathBuf = argument("path", path, "a path")?;
    wait::run(py, &Cancel::default(), || Ok(()), move || crate::inspect::inspect(&path))
}

/// Writes a GGUF.
#[pyfunction]
#[pyo3(
    signature = (src, dst, r#type, overwrite=None, progress=None),
    text_signature = "(src, dst, type, overwrite=False, progress=None)",
)]
pub fn convert(
    py: Python<'_>,
    src: &Bound<'_, PyAny>,
    dst: &Bound<'_, PyAny>,
    r#type: &Bound<'_, PyAny>,
    overwrite: Option<&Bound<'_, PyAny>>,
    progress: Option<&Bound<'_, PyAny>>,
) -> PyResult<()> {
    let (src, dst): (PathBuf, PathBuf) = (argument("src", src, "a path")?, argument("dst", dst, "a path")?);
    let weight_type = match argument::<String>("type", r#type, "a string")?.as_str() {
        "nvfp4" => WeightType::Nvfp4,
        "bf16" => WeightType::Bf16,
        other => return Err(Error::value("type", format!("{other:?}"), "nvfp4 or bf16").into()),
    };
    let overwrite = overwrite.map_or(Ok(false), |value| argument("overwrite", value, "True or False"))?;
    let progress = callback("progress", progress)?;
    let options = ConvertOptions { weight_type, overwrite };
    let (cancel, state) = (Cancel::default(), Progress::default());
    let (inner_cancel, inner_state) = (cancel.clone(), state.clone());
    wait::run(
        py,
        &cancel,
        || state.show(progress),
        move || {
            crate::convert::convert(&src, &dst, options, &mut |done, total| inner_state.set(done, total), &inner_cancel)
        },
    )
}

/// A value by its JSON.
pub fn to_python<'py>(py: Python<'py>, value: &impl Serialize) -> PyResult<Bound<'py, PyAny>> {
    // Of what we serialise, only a path can fail.
    let json = serde_json::to_string(value).map_err(|e| Error::value("path", e.to_string(), "a path in UTF-8"))?;
    py.import("json")?.call_method1("loads", (json,))
}

/// How far work on another thread has come, for a callback on the calling one.
#[derive(Clone, Default)]
pub struct Progress(Arc<[AtomicU64; 2]>);

impl Progress {
    /// Called by the work.
    pub fn set(&self, done: u64, total: u64) {
        self.0[0].store(done, Ordering::Relaxed);
        self.0[1].store(total, Ordering::Relaxed);
    }

    /// Calls `callback` with what is done and what there is, once that is known.
    pub fn show(&self, callback: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
        let [done, total] = [&self.0[0], &self.0[1]].map(|n| n.load(Ordering::Relaxed));
        if let (Some(callback), true) = (callback, total > 0) {
            callback.call1((done, total))?;
        }
        Ok(())
    }
}
