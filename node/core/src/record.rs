//! Recording of a node's inputs: the same inputs at the same times reproduce the same decisions.
//!
//! A recording is the mark, a header (with the node's configuration at start) and a sequence of entries, each prefixed with its
//! length. It may end anywhere, because the node may have been killed. Next: `simnet/src/replay.rs`.
use crate::codec::{self, CodecError, PROTOCOL};
use crate::config::Config;
use crate::input::Input;
use crate::limits::MESSAGE_BYTES_MAX;
use crate::time::Instant;
use alloc::{string::String, vec::Vec};
use serde::{Deserialize, Serialize};

/// The first bytes of a recording. The last byte is the version of the format.
pub const MARK: &[u8; 8] = b"MESHREC\x02";
/// Bytes of the longest entry: the longest message and its envelope.
pub const ENTRY_BYTES_MAX: usize = MESSAGE_BYTES_MAX + 4096;

/// The start of a recorded run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Header {
    /// The program that wrote the recording: another one may decide differently.
    pub program: String,
    /// Protocol version of the recorded inputs.
    pub protocol: u8,
    /// The node's configuration.
    pub config: Config,
    /// Seed of the node's random numbers.
    pub seed: u64,
}

/// One call by the driver.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum DriverCall {
    /// `handle` was called.
    Input {
        /// The time argument.
        at: Instant,
        /// The input.
        input: Input,
    },
    /// `poll` was called until there was no output: work from inputs between two such entries may run as one batch.
    Polled,
}

/// The same, borrowed.
#[derive(Serialize)]
enum EntryRef<'a> {
    Input { at: Instant, input: &'a Input },
    Polled,
}

/// Why reading a recording stops.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RecordError {
    /// Not a recording.
    #[error("expected a recording, which begins with {MARK:?}, found {found:?}")]
    NotARecording {
        /// The first bytes.
        found: Vec<u8>,
    },
    /// The recording has another protocol version than this program.
    #[error(
        "expected inputs of protocol {PROTOCOL}, found {found}: replay it with the meshnode that recorded it ({program})"
    )]
    Protocol {
        /// The recording's version.
        found: u8,
        /// The program that wrote it.
        program: String,
    },
    /// It ends within an entry, as after a kill. All entries before were read.
    #[error("the recording ends within entry {entry}, {missing} bytes are missing: the node may have been killed")]
    CutShort {
        /// Counted from 0; the header is not counted.
        entry: u64,
        /// At least this number of bytes.
        missing: usize,
    },
    /// An entry's length exceeds the limit.
    #[error("expected at most {ENTRY_BYTES_MAX} bytes in entry {entry}, found {found}: the recording is damaged")]
    TooLong {
        /// Counted from 0.
        entry: u64,
        /// The declared length.
        found: usize,
    },
    /// An entry cannot be decoded.
    #[error("entry {entry} is damaged: {why}")]
    Damaged {
        /// Counted from 0.
        entry: u64,
        /// The cause.
        why: CodecError,
    },
}

/// The first bytes of a recording.
pub fn begin(config: &Config, seed: u64, program: &str) -> Vec<u8> {
    let header = Header { program: program.into(), protocol: PROTOCOL, config: config.clone(), seed };
    let mut bytes = MARK.to_vec();
    append(&mut bytes, &header);
    bytes
}

/// Appends a call of `handle`.
pub fn append_input(bytes: &mut Vec<u8>, at: Instant, input: &Input) {
    append(bytes, &EntryRef::Input { at, input });
}

/// Appends a call of `poll` until there was no output.
pub fn append_polled(bytes: &mut Vec<u8>) {
    append(bytes, &EntryRef::Polled);
}

fn append<T: Serialize>(bytes: &mut Vec<u8>, part: &T) {
    let body = codec::encode_part(part);
    bytes.extend_from_slice(&u32::try_from(body.len()).unwrap_or(u32::MAX).to_le_bytes());
    bytes.extend_from_slice(&body);
}

/// Reads the entries in order; ends after the first error.
#[derive(Clone, Debug)]
pub struct Reader<'a> {
    rest: &'a [u8],
    entries: u64,
}

impl<'a> Reader<'a> {
    /// Reads the header.
    pub fn open(bytes: &'a [u8]) -> Result<(Header, Reader<'a>), RecordError> {
        let Some(rest) = bytes.strip_prefix(MARK) else {
            return Err(RecordError::NotARecording { found: bytes[..bytes.len().min(MARK.len())].to_vec() });
        };
        let mut reader = Reader { rest, entries: 0 };
        let missing = RecordError::CutShort { entry: 0, missing: LENGTH_BYTES };
        let header: Header = reader.part("header of a recording")?.ok_or(missing)?;
        if header.protocol != PROTOCOL {
            return Err(RecordError::Protocol { found: header.protocol, program: header.program });
        }
        Ok((header, reader))
    }

    fn part<T: serde::de::DeserializeOwned>(&mut self, what: &'static str) -> Result<Option<T>, RecordError> {
        let entry = self.entries;
        if self.rest.is_empty() {
            return Ok(None);
        }
        let Some((length, rest)) = self.rest.split_first_chunk::<LENGTH_BYTES>() else {
            return Err(RecordError::CutShort { entry, missing: LENGTH_BYTES - self.rest.len() });
        };
        let length = u32::from_le_bytes(*length) as usize;
        if length > ENTRY_BYTES_MAX {
            return Err(RecordError::TooLong { entry, found: length });
        }
        let Some((body, rest)) = rest.split_at_checked(length) else {
            return Err(RecordError::CutShort { entry, missing: length - rest.len() });
        };
        self.rest = rest;
        codec::decode_part::<T, ENTRY_BYTES_MAX>(what, body)
            .map(Some)
            .map_err(|why| RecordError::Damaged { entry, why })
    }
}

impl Iterator for Reader<'_> {
    type Item = Result<DriverCall, RecordError>;

    fn next(&mut self) -> Option<Self::Item> {
        let entry = self.part("entry of a recording").transpose()?;
        self.entries += 1;
        if entry.is_err() {
            self.rest = &[];
        }
        Some(entry)
    }
}

/// Bytes of the length prefix of an entry, little-endian.
const LENGTH_BYTES: usize = 4;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Capacity, DeviceCapacity};
    use crate::id::{CallId, Generation, NodeId};
    use crate::work::QuestionOrigin;
    use alloc::vec;
    use partitioner::{Answer, PlanError};

    fn recording() -> Vec<u8> {
        let capacity = Capacity {
            machine: 1,
            zone: String::new(),
            devices: vec![DeviceCapacity {
                device: "cpu".into(),
                memory_total: 2,
                memory_free: 1,
                bytes_per_second: 3,
                flops_per_second: 4,
                copy_bytes_per_second: 8,
                step_ns: 5,
                layer_ns: 9,
                cache_bytes_per_second: 10,
                ram_total: 0,
                ram_free: 0,
                ram_bytes_per_second: 0,
                ram_flops_per_second: 0,
                numerics: 6,
                pass_steps: 1,
                gone: false,
            }],
        };
        let config = Config {
            node: NodeId([7; 16]),
            generation: Generation(8),
            peer_id: vec![9],
            name: "a node".into(),
            gossip_addrs: vec!["10.0.0.1:1".parse().unwrap()],
            data_addrs: vec!["[::1]:2".parse().unwrap()],
            capacity: capacity.clone(),
        };
        let mut bytes = begin(&config, 10, "test");
        append_input(&mut bytes, Instant(1), &Input::CapacityChanged(capacity));
        let answer = Answer::Model(Err(PlanError::NoDevices));
        let planned = Input::Planned { asked: QuestionOrigin::Caller(CallId(3)), answer };
        append_input(&mut bytes, Instant(2), &planned);
        append_polled(&mut bytes);
        append_input(&mut bytes, Instant(3), &Input::Message { from: NodeId([1; 16]), bytes: vec![1, 2, 3] });
        bytes
    }

    #[test]
    fn a_recording_survives_a_round_trip() {
        let bytes = recording();
        let (header, reader) = Reader::open(&bytes).unwrap();
        assert_eq!((header.seed, header.program.as_str(), header.config.node), (10, "test", NodeId([7; 16])));
        let entries: Vec<DriverCall> = reader.map(Result::unwrap).collect();
        assert_eq!(entries.len(), 4);
        assert!(matches!(&entries[2], DriverCall::Polled));
        assert!(
            matches!(&entries[3], DriverCall::Input { at: Instant(3), input: Input::Message { bytes, .. } } if bytes.len() == 3)
        );
    }

    #[test]
    fn a_recording_truncated_anywhere_is_read_up_to_there() {
        let bytes = recording();
        for end in 0..bytes.len() {
            match Reader::open(&bytes[..end]) {
                Err(RecordError::NotARecording { .. }) => assert!(end < MARK.len()),
                Err(error) => assert!(matches!(error, RecordError::CutShort { .. }), "{end}: {error}"),
                Ok((_, reader)) => {
                    let read: Vec<_> = reader.collect();
                    let broken = read.iter().filter(|entry| entry.is_err()).count();
                    assert!(broken <= 1 && read.iter().rev().skip(1).all(Result::is_ok), "{end}");
                }
            }
        }
    }

    #[test]
    fn damage_is_reported_and_never_panics() {
        let bytes = recording();
        for at in 0..bytes.len() {
            for bit in [1u8, 0x80, 0xff] {
                let mut damaged = bytes.clone();
                damaged[at] ^= bit;
                if let Ok((_, reader)) = Reader::open(&damaged) {
                    reader.take(100).for_each(drop);
                }
            }
        }
        let mut long = bytes.clone();
        let (_, reader) = Reader::open(&bytes).unwrap();
        let first = bytes.len() - reader.rest.len();
        long[first..first + 4].copy_from_slice(&u32::MAX.to_le_bytes());
        let error = Reader::open(&long).unwrap().1.next().unwrap().unwrap_err();
        assert_eq!(error, RecordError::TooLong { entry: 0, found: u32::MAX as usize });
    }
}
