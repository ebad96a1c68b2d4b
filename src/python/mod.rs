//! The extension module `flint_rs._core`: conversions between Python and the engine, and waiting without the GIL. The
//! only place that names pyo3.

mod device_array;
mod errors;
mod files;
mod model;
mod params;
mod results;
mod stream;
mod wait;

/// The Rust core of `flint_rs`.
#[pyo3::pymodule(gil_used = false)]
mod _core {
    use pyo3::prelude::*;

    #[pymodule_export]
    use super::{
        device_array::DeviceArray,
        files::{convert, describe, inspect, plan},
        model::{Model, check_synthetic_request},
        params::SamplingParams,
        results::{Event, Logprob, Result, Timings, TokenLogprobs, Usage},
        stream::Stream,
    };

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", env!("CARGO_PKG_VERSION"))?;
        super::errors::add_classes(module)
    }
}
