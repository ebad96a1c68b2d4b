//! The one error type. Variants carry facts, so that a caller can act on them and a reader can see what to change.

use std::path::{Path, PathBuf};

/// What can go wrong between a checkpoint file and a generated token.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The operating system refused a file.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// What the operating system said.
        source: std::io::Error,
    },
    /// A file breaks its format or is not the Flint that this version runs.
    #[error("{}: {name}: expected {expected}, found {found}", file.display())]
    Format {
        /// The file that was read.
        file: PathBuf,
        /// The key, tensor, or part of the file that is wrong.
        name: String,
        /// What is accepted there.
        expected: String,
        /// What stands there.
        found: String,
    },
    /// An argument, option or request field is outside what is accepted.
    #[error("{field}: expected {accepted}, found {found}")]
    Value {
        /// The argument's name as the caller spells it.
        field: String,
        /// The value that came.
        found: String,
        /// The accepted type or range.
        accepted: String,
    },
    /// Something this machine or build does not have.
    #[error("{what} is not available: {why}")]
    Unavailable {
        /// The device, extra or feature that was asked for.
        what: String,
        /// What was found, and what would make it available.
        why: String,
    },
    /// A call to the GPU failed.
    #[error("{what} failed: {why}")]
    Device {
        /// The action, with the kernel's name where there is one.
        what: String,
        /// What the driver said, or what does not fit.
        why: String,
    },
    /// The work was cancelled before it ended; no partial result was kept.
    #[error("cancelled")]
    Cancelled,
    /// The object was used after it was closed.
    #[error("the model is closed")]
    Closed,
}

/// The crate's result.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// An [`Error::Io`] about `path`; shaped for `map_err`.
    pub fn io(path: &Path) -> impl FnOnce(std::io::Error) -> Self + '_ {
        move |source| Self::Io { path: path.to_path_buf(), source }
    }

    /// An [`Error::Format`] about `name` in `file`.
    pub fn format(file: &Path, name: impl Into<String>, expected: impl Into<String>, found: impl Into<String>) -> Self {
        Self::Format { file: file.to_path_buf(), name: name.into(), expected: expected.into(), found: found.into() }
    }

    /// An [`Error::Value`] about the argument `field`.
    pub fn value(field: impl Into<String>, found: impl Into<String>, accepted: impl Into<String>) -> Self {
        Self::Value { field: field.into(), found: found.into(), accepted: accepted.into() }
    }

    /// The same error for someone else who meets it.
    #[must_use]
    pub fn again(&self) -> Self {
        match self {
            Self::Io { path, source } => {
                let source = std::io::Error::new(source.kind(), source.to_string());
                Self::Io { path: path.clone(), source }
            }
            Self::Format { file, name, expected, found } => Self::format(file, name, expected, found),
            Self::Value { field, found, accepted } => Self::value(field, found, accepted),
            Self::Unavailable { what, why } => Self::Unavailable { what: what.clone(), why: why.clone() },
            Self::Device { what, why } => Self::Device { what: what.clone(), why: why.clone() },
            Self::Cancelled => Self::Cancelled,
            Self::Closed => Self::Closed,
        }
    }
}
