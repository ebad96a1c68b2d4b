//! A cursor over the header of a GGUF that believes no length.

use std::path::Path;

use super::Value;
use crate::error::{Error, Result};

/// Array elements that one file's metadata may hold in total, because each costs 32 bytes once parsed: about four times
/// what the 150 thousand tokens of Flint need for their texts, types and merges.
const MAX_ARRAY_ELEMENTS: usize = 1 << 21;

const STRING: u32 = 8;
const ARRAY: u32 = 9;

/// Reads a header from front to back. `what` and `key` name the part that is read, for errors.
pub(super) struct Reader<'a> {
    file: &'a Path,
    rest: &'a [u8],
    len: usize,
    elements_left: usize,
}

impl<'a> Reader<'a> {
    pub(super) fn new(file: &'a Path, bytes: &'a [u8]) -> Self {
        Self { file, rest: bytes, len: bytes.len(), elements_left: MAX_ARRAY_ELEMENTS }
    }

    /// Bytes read so far.
    pub(super) fn at(&self) -> usize {
        self.len - self.rest.len()
    }

    pub(super) fn u32(&mut self, what: &str) -> Result<u32> {
        self.array(what).map(u32::from_le_bytes)
    }

    pub(super) fn u64(&mut self, what: &str) -> Result<u64> {
        self.array(what).map(u64::from_le_bytes)
    }

    /// A count of items that take at least `item_bytes` each, so that a wrong one is refused before anything is
    /// allocated for it; at most `limit`, which bounds memory where the file is large.
    pub(super) fn count(&mut self, what: &str, item_bytes: usize, limit: usize) -> Result<usize> {
        let count = self.u64(what)?;
        let left = self.rest.len();
        match usize::try_from(count) {
            Ok(count) if count <= limit.min(left / item_bytes) => Ok(count),
            _ => {
                let expected = format!("a count of at most {limit} whose items fit the remaining {left} bytes");
                Err(self.error(what, expected, count.to_string()))
            }
        }
    }

    /// A length and as many bytes of UTF-8.
    pub(super) fn string(&mut self, what: &str) -> Result<&'a str> {
        let len = self.u64(what)?;
        let bytes = self.take(what, len)?;
        str::from_utf8(bytes).map_err(|error| self.error(what, "UTF-8", format!("{error} of a string of {len} bytes")))
    }

    /// A value type and the value.
    pub(super) fn value(&mut self, key: &str) -> Result<Value> {
        match self.u32(key)? {
            ARRAY => self.list(key),
            kind => self.scalar(key, kind),
        }
    }

    fn list(&mut self, key: &str) -> Result<Value> {
        let kind = self.u32(key)?;
        if kind == ARRAY {
            return Err(self.error(key, "a list of numbers, bools or strings", "a list of lists"));
        }
        let count = self.count(key, self.least_bytes(key, kind)?, self.elements_left)?;
        self.elements_left -= count;
        let mut values = Vec::with_capacity(count);
        for _ in 0..count {
            values.push(self.scalar(key, kind)?);
        }
        Ok(Value::Array(values))
    }

    fn scalar(&mut self, key: &str, kind: u32) -> Result<Value> {
        Ok(match kind {
            0 => Value::Unsigned(u8::from_le_bytes(self.array(key)?).into()),
            1 => Value::Signed(i8::from_le_bytes(self.array(key)?).into()),
            2 => Value::Unsigned(u16::from_le_bytes(self.array(key)?).into()),
            3 => Value::Signed(i16::from_le_bytes(self.array(key)?).into()),
            4 => Value::Unsigned(u32::from_le_bytes(self.array(key)?).into()),
            5 => Value::Signed(i32::from_le_bytes(self.array(key)?).into()),
            6 => Value::Float(f32::from_le_bytes(self.array(key)?).into()),
            7 => match self.array(key)? {
                [0] => Value::Bool(false),
                [1] => Value::Bool(true),
                [other] => return Err(self.error(key, "a bool of 0 or 1", other.to_string())),
            },
            STRING => Value::String(self.string(key)?.to_owned()),
            10 => Value::Unsigned(u64::from_le_bytes(self.array(key)?)),
            11 => Value::Signed(i64::from_le_bytes(self.array(key)?)),
            12 => Value::Float(f64::from_le_bytes(self.array(key)?)),
            other => return Err(self.unknown_kind(key, other)),
        })
    }

    /// Bytes of the shortest value of a type that is not a list.
    fn least_bytes(&self, key: &str, kind: u32) -> Result<usize> {
        Ok(match kind {
            0 | 1 | 7 => 1,
            2 | 3 => 2,
            4..=6 => 4,
            STRING | 10..=12 => 8,
            other => return Err(self.unknown_kind(key, other)),
        })
    }

    fn unknown_kind(&self, key: &str, kind: u32) -> Error {
        self.error(key, "a value type from 0 to 12", format!("value type {kind}"))
    }

    fn array<const N: usize>(&mut self, what: &str) -> Result<[u8; N]> {
        let Some((array, rest)) = self.rest.split_first_chunk() else { return Err(self.too_short(what, N as u64)) };
        self.rest = rest;
        Ok(*array)
    }

    fn take(&mut self, what: &str, len: u64) -> Result<&'a [u8]> {
        let split = usize::try_from(len).ok().and_then(|len| self.rest.split_at_checked(len));
        let Some((bytes, rest)) = split else { return Err(self.too_short(what, len)) };
        self.rest = rest;
        Ok(bytes)
    }

    fn too_short(&self, what: &str, len: u64) -> Error {
        let found = format!("{} bytes up to the end of the file", self.rest.len());
        self.error(what, format!("{len} bytes at offset {}", self.at()), found)
    }

    pub(super) fn error(&self, what: &str, expected: impl Into<String>, found: impl Into<String>) -> Error {
        Error::format(self.file, what, expected, found)
    }
}
