//! Every error of the crate as a Python exception.

use pyo3::{
    exceptions::{PyException, PyOSError, PyRuntimeError, PyValueError},
    prelude::*,
    sync::PyOnceLock,
    types::{PyDict, PyTuple, PyType},
};

use crate::error::Error;

struct Classes {
    checkpoint: Py<PyType>,
    value: Py<PyType>,
    unavailable: Py<PyType>,
    device: Py<PyType>,
    cancelled: Py<PyType>,
    closed: Py<PyType>,
}

static CLASSES: PyOnceLock<Classes> = PyOnceLock::new();

/// Creates the exception classes and puts them into the module. All but those of the operating system derive from
/// `FlintError`, and each also from the built-in class that a caller would expect.
pub fn add_classes(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let py = module.py();
    let new = |name: &str, doc: &str, bases: Vec<Bound<'_, PyType>>| -> PyResult<Py<PyType>> {
        let body = PyDict::new(py);
        body.set_item("__doc__", doc)?;
        body.set_item("__module__", "flint_rs")?;
        let class = py.get_type::<PyType>().call1((name, PyTuple::new(py, bases)?, body))?;
        module.add(name, &class)?;
        Ok(class.cast_into::<PyType>()?.unbind())
    };
    let base = new("FlintError", "Base of the errors of flint_rs.", vec![py.get_type::<PyException>()])?;
    let derived = |name, doc, builtin| new(name, doc, vec![base.bind(py).clone(), builtin]);
    let (value, runtime) = (py.get_type::<PyValueError>(), py.get_type::<PyRuntimeError>());
    let classes = Classes {
        checkpoint: derived(
            "CheckpointError",
            "A file breaks its format or is not the Flint that this version runs.",
            value.clone(),
        )?,
        value: derived("InvalidValueError", "An argument is outside what is accepted; the message names it.", value)?,
        unavailable: derived(
            "UnavailableError",
            "Something that this machine, build or process does not have.",
            runtime.clone(),
        )?,
        device: derived("DeviceError", "A call to the GPU failed.", runtime.clone())?,
        cancelled: derived("CancelledError", "The work was cancelled before it ended.", runtime.clone())?,
        closed: derived("ClosedError", "The model was used after it was closed.", runtime)?,
    };
    // The module is initialised once in a process: pyo3 refuses subinterpreters.
    let _ = CLASSES.set(py, classes);
    Ok(())
}

impl From<Error> for PyErr {
    fn from(error: Error) -> Self {
        Python::attach(|py| {
            let classes = CLASSES.get(py).expect("errors arise after the module is initialised");
            let class = match &error {
                // OSError picks its subclass, such as FileNotFoundError, by the number.
                Error::Io { path, source } => {
                    let text = source.to_string();
                    return match source.raw_os_error() {
                        Some(number) => {
                            let text = text.trim_end_matches(&format!(" (os error {number})")).to_owned();
                            PyOSError::new_err((number, text, path.clone().into_os_string()))
                        }
                        None => PyOSError::new_err(error.to_string()),
                    };
                }
                Error::Format { .. } => &classes.checkpoint,
                Error::Value { .. } => &classes.value,
                Error::Unavailable { .. } => &classes.unavailable,
                Error::Device { .. } => &classes.device,
                Error::Cancelled => &classes.cancelled,
                Error::Closed => &classes.closed,
            };
            Self::from_type(class.bind(py).clone(), error.to_string())
        })
    }
}
