//! The CUDA backend: the only place that names cudarc. No toolkit and no driver is needed to build it or to start a
//! process that has it.

mod driver;
mod images;

pub use driver::{Buffer, Call, Device, Event, Function, Graph, Kernels, Pinned};
pub use images::{Fatbin, IMAGES, Image};
