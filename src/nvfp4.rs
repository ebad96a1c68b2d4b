//! The NVFP4 number format.
