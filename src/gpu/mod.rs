//! The CUDA backend: the only place that names cudarc. No toolkit and no driver is needed to build it or to start a
//! process that has it.

mod decode;
mod driver;
mod images;
mod load;
mod model;
mod pack;
mod prefill;
mod recordings;
mod tables;

pub use driver::{Buffer, Call, Device, DeviceMemory, Event, Function, Graph, Kernels, Pinned};
pub use images::{Fatbin, IMAGES, Image};
pub use load::Source;
pub use model::{GpuModel, RunOptions, SequenceId};
