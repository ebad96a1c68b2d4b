//! Flint on one machine. Data goes one way, and each room imports only rooms listed above it:
//!
//! ```text
//! checkpoint file ─ checkpoint ─ weights ─┐
//! config.json / GGUF keys ─ config ───────┴─ cpu ─ logits ─ sampling ─ tokens
//! text ─ tokenizer ─ engine ─ events ─ python
//! ```

pub mod error;
pub mod cancel;
mod threads;
pub mod nvfp4;
pub mod checkpoint;
pub mod config;
pub mod kv;
pub mod weights;
pub mod tokenizer;
pub mod convert;
pub mod inspect;
pub mod sampling;
pub mod stop;
pub mod tiles;
pub mod kernels;
pub mod plan;
pub mod cpu;
#[cfg(feature = "cuda")]
pub mod gpu;
pub mod engine;
#[cfg(feature = "python")]
mod python;

pub use error::{Error, Result};
