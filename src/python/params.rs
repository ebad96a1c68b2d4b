//! Arguments from Python, and the sampling parameters.

use std::collections::BTreeMap;

use pyo3::{
    IntoPyObjectExt,
    exceptions::{PyOverflowError, PyTypeError, PyUnicodeEncodeError, PyValueError},
    prelude::*,
    types::{PyDict, PyFloat, PyString},
};

use crate::{error::Error, sampling};

/// Most items of a sequence: far more than any vocabulary or context has.
const MAX_ITEMS: usize = 1 << 24;
/// Characters of a value that an error repeats.
const SHOWN_CHARS: usize = 200;

/// How an error shows a value: as Python does, cut when long.
fn shown(value: &Bound<'_, PyAny>) -> String {
    let text = value.repr().map_or_else(|_| value.get_type().to_string(), |repr| repr.to_string());
    match text.char_indices().nth(SHOWN_CHARS) {
        Some((end, _)) => format!("{} ...", &text[..end]),
        None => text,
    }
}

/// A callback that may be left out. Errors: `TypeError` naming `name`, before any work begins.
pub fn callback<'a, 'py>(name: &str, value: Option<&'a Bound<'py, PyAny>>) -> PyResult<Option<&'a Bound<'py, PyAny>>> {
    match value.filter(|value| !value.is_none()) {
        Some(value) if !value.is_callable() => {
            let found = shown(value);
            Err(PyTypeError::new_err(format!("{name}: expected None or a callable, found {found}")))
        }
        callback => Ok(callback),
    }
}

/// Converts the argument `name`; the error of one that does not fit names it and says what is accepted.
pub fn argument<'py, T>(name: &str, value: &Bound<'py, PyAny>, accepted: &str) -> PyResult<T>
where
    T: for<'a> FromPyObject<'a, 'py>,
{
    let py = value.py();
    // Room is made for as many items as a sequence says it has: `range(10**12)` would end the process.
    if let Some(n) = value.len().ok().filter(|&n| n > MAX_ITEMS && !value.is_instance_of::<PyString>()) {
        return Err(Error::value(name, format!("{n} items"), format!("at most {MAX_ITEMS} items")).into());
    }
    value.extract::<T>().map_err(|error| {
        let error: PyErr = error.into();
        if error.is_instance_of::<PyUnicodeEncodeError>(py) {
            return surrogate(name, &error, value).into();
        }
        let found = shown(value);
        if error.is_instance_of::<PyTypeError>(py) || error.is_instance_of::<PyValueError>(py) {
            PyTypeError::new_err(format!("{name}: expected {accepted}, found {found}"))
        } else if error.is_instance_of::<PyOverflowError>(py) {
            // A number of the right type that does not fit.
            Error::value(name, found, accepted).into()
        } else {
            // What the value's own code raised, Ctrl-C among it, says nothing of what it is.
            error
        }
    })
}

/// The same for an argument that may be left out.
pub fn optional<'py, T>(name: &str, value: Option<&Bound<'py, PyAny>>, accepted: &str) -> PyResult<Option<T>>
where
    T: for<'a> FromPyObject<'a, 'py>,
{
    value.map(|value| argument(name, value, accepted)).transpose()
}

/// Half of a UTF-16 pair, which Python's strings may hold and no text does: what reading bytes with `surrogateescape` leaves,
/// as Python does with arguments of the command line.
fn surrogate(name: &str, error: &PyErr, value: &Bound<'_, PyAny>) -> Error {
    let at = error.value(value.py()).getattr("start").and_then(|start| start.extract::<usize>());
    let found = match at {
        Ok(at) if value.is_instance_of::<PyString>() => match value.get_item(at) {
            Ok(half) => format!("the lone surrogate {} at position {at}", shown(&half)),
            Err(_) => shown(value),
        },
        _ => shown(value),
    };
    Error::value(name, found, "text that UTF-8 can write")
}

/// `error` with the number that the caller gave: fp32 makes `inf` of 1e300.
fn as_given(mut error: Error, options: Option<&Bound<'_, PyDict>>) -> Error {
    if let Error::Value { field, found, .. } = &mut error
        && let Some(value) = options.and_then(|options| options.get_item(&*field).ok().flatten())
        && value.is_instance_of::<PyFloat>()
    {
        *found = shown(&value);
    }
    error
}

/// Python's value of a field.
trait ToPython {
    fn to_python<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>>;
}

/// The shortest decimal that stands for an fp32: 0.95, not 0.949999988.
fn shortest(value: f32) -> f64 {
    value.to_string().parse().expect("Rust reads the numbers it writes")
}

impl ToPython for f32 {
    fn to_python<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        shortest(*self).into_bound_py_any(py)
    }
}

impl ToPython for BTreeMap<u32, f32> {
    fn to_python<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        self.iter().map(|(&id, &bias)| (id, shortest(bias))).collect::<BTreeMap<_, _>>().into_bound_py_any(py)
    }
}

macro_rules! to_python_as_it_is {
    ($($type:ty),*) => {
        $(impl ToPython for $type {
            fn to_python<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
                self.clone().into_bound_py_any(py)
            }
        })*
    };
}
to_python_as_it_is!(i64, bool, usize, Option<u64>, Option<usize>, Vec<u32>, Option<Vec<u32>>, Vec<String>);

/// Writes the Python class around [`sampling::SamplingParams`] from the list of its fields.
macro_rules! sampling_params {
    ($signature:literal, $($field:ident: $accepted:literal,)*) => {
        #[pymethods]
        impl SamplingParams {
            #[new]
            #[pyo3(signature = (**options), text_signature = $signature)]
            fn new(options: Option<&Bound<'_, PyDict>>) -> PyResult<Self> {
                let mut params = sampling::SamplingParams::default();
                for (name, value) in options.into_iter().flatten() {
                    let name: String = name.extract()?;
                    match name.as_str() {
                        $(stringify!($field) => params.$field = argument(&name, &value, $accepted)?,)*
                        _ => return Err(PyTypeError::new_err(format!("{name}: no such sampling parameter"))),
                    }
                }
                // Token ids are compared with the model's vocabulary when it is known.
                params.validate(usize::MAX).map_err(|error| as_given(error, options))?;
                Ok(Self(params))
            }

            $(#[getter]
            fn $field<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
                self.0.$field.to_python(py)
            })*

            fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
                let fields = [$((stringify!($field), self.0.$field.to_python(py)?.repr()?.to_string())),*];
                let fields = fields.map(|(name, value)| format!("{name}={value}"));
                Ok(format!("SamplingParams({})", fields.join(", ")))
            }
        }
    };
}

/// How the tokens of a request are chosen and when it ends.
#[pyclass(frozen, eq, module = "flint_rs")]
#[derive(Clone, PartialEq)]
pub struct SamplingParams(pub sampling::SamplingParams);

sampling_params! {
    "(*, temperature=1.0, top_k=20, top_p=0.95, min_p=0.0, repetition_penalty=1.0, frequency_penalty=0.0, \
      presence_penalty=0.0, logit_bias={}, allowed_token_ids=None, banned_token_ids=(), seed=None, max_tokens=None, \
      min_tokens=0, stop=(), stop_token_ids=(), include_stop_str_in_output=False, ignore_eos=False, logprobs=None, \
      prompt_logprobs=None)",
    temperature: "a number",
    top_k: "an integer from -1 to 2**63 - 1",
    top_p: "a number",
    min_p: "a number",
    repetition_penalty: "a number",
    frequency_penalty: "a number",
    presence_penalty: "a number",
    logit_bias: "a dict of token ids from 0 to 2**32 - 1 and numbers",
    allowed_token_ids: "None or a list of token ids from 0 to 2**32 - 1",
    banned_token_ids: "a list of token ids from 0 to 2**32 - 1",
    seed: "None or an integer from 0 to 2**64 - 1",
    max_tokens: "None or an integer from 1 to 2**64 - 1",
    min_tokens: "an integer from 0 to 2**64 - 1",
    stop: "a list of strings",
    stop_token_ids: "a list of token ids from 0 to 2**32 - 1",
    include_stop_str_in_output: "True or False",
    ignore_eos: "True or False",
    logprobs: "None or an integer from 0 to 20",
    prompt_logprobs: "None or an integer from 0 to 20",
}

impl SamplingParams {
    /// Of a request that gives either an object or keywords.
    pub fn of_request(
        params: Option<&Bound<'_, PyAny>>,
        options: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<sampling::SamplingParams> {
        match params {
            None => Self::new(options).map(|params| params.0),
            Some(params) if options.is_none_or(PyDictMethods::is_empty) => {
                let Ok(params) = params.cast::<Self>() else {
                    let found = params.get_type().name()?;
                    return Err(PyTypeError::new_err(format!(
                        "params: expected SamplingParams or None, found {found}"
                    )));
                };
                Ok(params.get().0.clone())
            }
            Some(_) => Err(PyTypeError::new_err("params: expected SamplingParams or keywords, found both")),
        }
    }
}
