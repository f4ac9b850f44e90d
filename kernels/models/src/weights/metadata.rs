//! Key/value metadata of the header. Arrays stay in the header bytes and are read on demand, so that a count in a malicious
//! header causes no allocation.
use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;

use bytes::Bytes;

use super::error::WeightsError;

/// Typed key/value pairs.
#[derive(Clone)]
pub struct Metadata {
    bytes: Bytes,
    entries: BTreeMap<String, Value>,
}

/// One value. Integers and floats are widened, because writers use different widths.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// Any unsigned integer.
    Unsigned(u64),
    /// Any signed integer.
    Signed(i64),
    /// f32 or f64.
    Float(f64),
    /// A boolean.
    Bool(bool),
    /// A string.
    Text(String),
    /// An array in the header bytes.
    Array(Array),
}

/// An array whose elements have been checked to lie inside the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Array {
    /// Type of all elements.
    pub element: Element,
    /// Number of elements.
    pub len: usize,
    /// Byte range in the file.
    pub range: Range<usize>,
}

/// Element types of GGUF, without arrays.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "the names are self-explanatory")]
pub enum Element {
    U8,
    I8,
    U16,
    I16,
    U32,
    I32,
    F32,
    Bool,
    Text,
    U64,
    I64,
    F64,
}

impl Element {
    /// GGUF's number of an array, which is no type of elements.
    pub(super) const ARRAY: u32 = 9;
    /// All types.
    const ALL: [Self; 12] = [
        Self::U8,
        Self::I8,
        Self::U16,
        Self::I16,
        Self::U32,
        Self::I32,
        Self::F32,
        Self::Bool,
        Self::Text,
        Self::U64,
        Self::I64,
        Self::F64,
    ];

    /// The type of a number in GGUF.
    pub(super) fn from_gguf(id: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|element| element.gguf_id() == id)
    }

    /// Bytes of one element; `None` for strings.
    #[must_use]
    pub fn size(self) -> Option<usize> {
        match self {
            Self::U8 | Self::I8 | Self::Bool => Some(1),
            Self::U16 | Self::I16 => Some(2),
            Self::U32 | Self::I32 | Self::F32 => Some(4),
            Self::U64 | Self::I64 | Self::F64 => Some(8),
            Self::Text => None,
        }
    }

    /// The type's number in GGUF.
    pub(super) fn gguf_id(self) -> u32 {
        match self {
            Self::U8 => 0,
            Self::I8 => 1,
            Self::U16 => 2,
            Self::I16 => 3,
            Self::U32 => 4,
            Self::I32 => 5,
            Self::F32 => 6,
            Self::Bool => 7,
            Self::Text => 8,
            Self::U64 => 10,
            Self::I64 => 11,
            Self::F64 => 12,
        }
    }

    /// Decodes one little-endian element of `size()` bytes; `None` for strings and invalid booleans.
    pub(super) fn value(self, b: &[u8]) -> Option<Value> {
        let mut wide = [0u8; 8];
        wide.get_mut(..b.len())?.copy_from_slice(b);
        let unsigned = u64::from_le_bytes(wide);
        // Sign-extend: shift the sign bit up to bit 63, then arithmetically back.
        let signed = || {
            let unused = 64 - 8 * b.len() as u32;
            (unsigned << unused).cast_signed() >> unused
        };
        Some(match self {
            Self::U8 | Self::U16 | Self::U32 | Self::U64 => Value::Unsigned(unsigned),
            Self::I8 | Self::I16 | Self::I32 | Self::I64 => Value::Signed(signed()),
            Self::F32 => Value::Float(f64::from(f32::from_bits(unsigned as u32))),
            Self::F64 => Value::Float(f64::from_bits(unsigned)),
            Self::Bool if unsigned <= 1 => Value::Bool(unsigned == 1),
            Self::Bool | Self::Text => return None,
        })
    }
}

impl Metadata {
    pub(super) fn new(bytes: Bytes, entries: BTreeMap<String, Value>) -> Self {
        Self { bytes, entries }
    }

    /// The metadata of any GGUF file, even one without a model.
    ///
    /// # Errors
    /// As for opening a model, without the checks specific to models.
    pub fn from_gguf(bytes: &Bytes) -> Result<Self, WeightsError> {
        Ok(super::gguf::parse(bytes, bytes.len() as u64)?.metadata)
    }

    /// The bytes up to the end of the last entry.
    pub(super) fn bytes(&self) -> &Bytes {
        &self.bytes
    }

    /// Key/values as GGUF writes them, in the order of their keys. Numbers are 64 bits wide; arrays stay as they are.
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut out = Vec::new();
        let text = |out: &mut Vec<u8>, text: &str| {
            out.extend((text.len() as u64).to_le_bytes());
            out.extend(text.as_bytes());
        };
        for (key, value) in &self.entries {
            text(&mut out, key);
            let kind = match value {
                Value::Unsigned(_) => Element::U64.gguf_id(),
                Value::Signed(_) => Element::I64.gguf_id(),
                Value::Float(_) => Element::F64.gguf_id(),
                Value::Bool(_) => Element::Bool.gguf_id(),
                Value::Text(_) => Element::Text.gguf_id(),
                Value::Array(_) => Element::ARRAY,
            };
            out.extend(kind.to_le_bytes());
            match value {
                Value::Unsigned(v) => out.extend(v.to_le_bytes()),
                Value::Signed(v) => out.extend(v.to_le_bytes()),
                Value::Float(v) => out.extend(v.to_le_bytes()),
                Value::Bool(v) => out.push(u8::from(*v)),
                Value::Text(v) => text(&mut out, v),
                Value::Array(array) => {
                    out.extend(array.element.gguf_id().to_le_bytes());
                    out.extend((array.len as u64).to_le_bytes());
                    out.extend(&self.bytes[array.range.clone()]);
                }
            }
        }
        out
    }

    /// Number of keys.
    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    /// The value of a key.
    #[must_use]
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.entries.get(key)
    }

    /// Keys and values in key order.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Value)> {
        self.entries.iter().map(|(k, v)| (k.as_str(), v))
    }

    /// A non-negative integer.
    ///
    /// # Errors
    /// The value has another type or is negative.
    pub fn unsigned(&self, key: &str) -> Result<Option<u64>, WeightsError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Unsigned(v)) => Ok(Some(*v)),
            Some(Value::Signed(v)) if *v >= 0 => Ok(Some(v.cast_unsigned())),
            Some(other) => Err(mismatch(key, "an integer of at least 0", other)),
        }
    }

    /// A finite number.
    ///
    /// # Errors
    /// The value has another type, or is NaN or infinite.
    pub fn float(&self, key: &str) -> Result<Option<f64>, WeightsError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Float(v)) if v.is_finite() => Ok(Some(*v)),
            Some(Value::Unsigned(v)) => Ok(Some(*v as f64)),
            Some(Value::Signed(v)) => Ok(Some(*v as f64)),
            Some(other) => Err(mismatch(key, "a finite number", other)),
        }
    }

    /// A boolean.
    ///
    /// # Errors
    /// The value has another type.
    pub fn bool(&self, key: &str) -> Result<Option<bool>, WeightsError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Bool(v)) => Ok(Some(*v)),
            Some(other) => Err(mismatch(key, "a boolean", other)),
        }
    }

    /// A string.
    ///
    /// # Errors
    /// The value has another type.
    pub fn text(&self, key: &str) -> Result<Option<&str>, WeightsError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Text(v)) => Ok(Some(v)),
            Some(other) => Err(mismatch(key, "a string", other)),
        }
    }

    /// An array of strings, as raw bytes (vocabularies contain pieces that are not UTF-8).
    ///
    /// # Errors
    /// The value has another type.
    pub fn texts(&self, key: &str) -> Result<Option<Texts<'_>>, WeightsError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Array(a)) if a.element == Element::Text => {
                Ok(Some(Texts { rest: &self.bytes[a.range.clone()], left: a.len }))
            }
            Some(other) => Err(mismatch(key, "an array of strings", other)),
        }
    }

    /// An array of numbers.
    ///
    /// # Errors
    /// The value has another type.
    pub fn numbers(&self, key: &str) -> Result<Option<Vec<f64>>, WeightsError> {
        let array = match self.get(key) {
            None => return Ok(None),
            Some(Value::Array(a)) => a,
            Some(other) => return Err(mismatch(key, "an array of numbers", other)),
        };
        let wrong = || mismatch(key, "an array of numbers", &Value::Array(array.clone()));
        let size = array.element.size().ok_or_else(wrong)?;
        self.bytes[array.range.clone()]
            .chunks_exact(size)
            .map(|b| match array.element.value(b) {
                Some(Value::Float(v)) => Ok(v),
                Some(Value::Unsigned(v)) => Ok(v as f64),
                Some(Value::Signed(v)) => Ok(v as f64),
                Some(Value::Bool(_) | Value::Text(_) | Value::Array(_)) | None => Err(wrong()),
            })
            .collect::<Result<_, _>>()
            .map(Some)
    }
}

impl fmt::Debug for Metadata {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(&self.entries).finish()
    }
}

/// Iterator over the strings of an array.
#[derive(Clone, Debug)]
pub struct Texts<'a> {
    rest: &'a [u8],
    left: usize,
}

impl<'a> Iterator for Texts<'a> {
    type Item = &'a [u8];

    fn next(&mut self) -> Option<&'a [u8]> {
        self.left = self.left.checked_sub(1)?;
        // The lengths were checked when the header was parsed.
        let (len, rest) = self.rest.split_first_chunk::<8>()?;
        let (text, rest) = rest.split_at_checked(usize::try_from(u64::from_le_bytes(*len)).ok()?)?;
        self.rest = rest;
        Some(text)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (0, Some(self.left))
    }
}

fn mismatch(key: &str, expected: &str, found: &Value) -> WeightsError {
    let found = match found {
        Value::Unsigned(v) => format!("the integer {v}"),
        Value::Signed(v) => format!("the integer {v}"),
        Value::Float(v) => format!("the number {v}"),
        Value::Bool(v) => format!("the boolean {v}"),
        Value::Text(_) => "a string".to_owned(),
        Value::Array(a) => format!("an array of {} {:?}", a.len, a.element),
    };
    WeightsError::Malformed(format!("metadata key {key:?}: expected {expected}, found {found}"))
}
