//! A frame as it lies on the wire: a fixed little-endian header, then the payload. The header is checked against what
//! was expected before a byte of payload is read or allocated.
use crate::identity::NodeId;
use crate::wire::Reader;
use bytes::Bytes;
use thiserror::Error;

/// Bytes of a header.
pub const HEADER_BYTES: usize = 68;
/// Largest payload of any job: 512 positions of a model 16,384 wide in f32. Expectations may only be smaller.
pub const PAYLOAD_BYTES_MAX: usize = 32 << 20;

/// One version of a job's placement: (counter, issuer), ordered lexicographically.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Epoch {
    /// Grows with each re-plan.
    pub counter: u32,
    /// Who minted it.
    pub issuer: NodeId,
}

/// The stream a frame travels on: one per job, epoch and receiving part.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Route {
    /// Which job.
    pub job: u64,
    /// Under which placement.
    pub epoch: Epoch,
    /// Which part of the job receives it.
    pub part: u16,
}

/// What a frame says about itself. Lengths, codec and checksum are added on the way out and checked on the way in.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FrameHead {
    /// Its stream.
    pub route: Route,
    /// Which of the part's inputs: a request of a stage, a link of a tile.
    pub channel: u64,
    /// Where in the channel: the first position, or the step.
    pub cursor: u32,
    /// Rows of a stage, one per position; elements of a tile's halo.
    pub count: u32,
    /// Its last row is the last of the channel that its source knows: a model's last stage samples from it.
    pub last: bool,
    /// Kind of element.
    pub dtype: Dtype,
    /// Elements per row.
    pub width: u32,
}

impl FrameHead {
    /// Bytes of the payload before any codec.
    pub fn raw_bytes(&self) -> u64 {
        u64::from(self.count) * u64::from(self.width) * self.dtype.bytes()
    }
}

/// Kind of element.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Dtype {
    /// Token ids.
    U32 = 0,
    /// Hidden rows.
    F32 = 1,
    /// Half precision.
    F16 = 2,
    /// Brain float.
    Bf16 = 3,
    /// Cells of a grid, 32 bits each.
    Cells = 4,
    /// Cells of a grid, a bit each, eight to an element.
    Bits = 5,
    /// Cells of a grid, 16 bits each.
    HalfCells = 6,
}

impl Dtype {
    /// Bytes of one element.
    pub fn bytes(self) -> u64 {
        match self {
            Dtype::U32 | Dtype::F32 | Dtype::Cells => 4,
            Dtype::F16 | Dtype::Bf16 | Dtype::HalfCells => 2,
            Dtype::Bits => 1,
        }
    }

    fn from_wire(byte: u8) -> Option<Self> {
        [Dtype::U32, Dtype::F32, Dtype::F16, Dtype::Bf16, Dtype::Cells, Dtype::Bits, Dtype::HalfCells]
            .into_iter()
            .find(|d| *d as u8 == byte)
    }
}

/// How a payload is packed. 2 and 3 are kept for the 8-bit and 4-bit block codecs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Codec {
    /// As it is.
    Raw = 0,
    /// Bytes of equal significance side by side, then zstd: lossless.
    ShuffledZstd = 1,
}

impl Codec {
    fn from_wire(byte: u8) -> Option<Self> {
        [Codec::Raw, Codec::ShuffledZstd].into_iter().find(|c| *c as u8 == byte)
    }
}

/// What a job may send on a stream, told before the stream is read.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Expectation {
    /// Elements per row.
    pub width: u32,
    /// Most rows in one frame.
    pub count_max: u32,
    /// Kinds of element.
    pub dtypes: Vec<Dtype>,
    /// Packings.
    pub codecs: Vec<Codec>,
}

impl Expectation {
    /// Hidden rows of a model `width` wide, lossless.
    pub fn hidden(width: u32, count_max: u32) -> Self {
        Self { width, count_max, dtypes: vec![Dtype::F32], codecs: vec![Codec::Raw, Codec::ShuffledZstd] }
    }

    /// Token ids for a first stage.
    pub fn tokens(count_max: u32) -> Self {
        Self { width: 1, count_max, dtypes: vec![Dtype::U32], codecs: vec![Codec::Raw, Codec::ShuffledZstd] }
    }

    /// Strips of a grid, at most so many elements each.
    pub fn strips(dtype: Dtype, elements_max: u32) -> Self {
        Self { width: 1, count_max: elements_max, dtypes: vec![dtype], codecs: vec![Codec::Raw, Codec::ShuffledZstd] }
    }

    /// Largest payload that fits it.
    pub fn bytes_max(&self) -> u64 {
        let element = self.dtypes.iter().map(|d| d.bytes()).max().unwrap_or(0);
        (u64::from(self.width) * u64::from(self.count_max)).saturating_mul(element).min(PAYLOAD_BYTES_MAX as u64)
    }
}

/// A checked header: what to read next.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Incoming {
    /// The frame.
    pub head: FrameHead,
    /// How its payload is packed.
    pub codec: Codec,
    /// Payload bytes on the wire: at most `raw_length`.
    pub wire_length: usize,
    /// Payload bytes unpacked: exactly what the shape says, at most what was expected.
    pub raw_length: usize,
    checksum: u32,
    seed: u32,
}

impl Incoming {
    /// Whether these are the bytes that were sent.
    ///
    /// # Errors
    /// [`FrameError::Checksum`].
    pub fn check(&self, payload: &[u8]) -> Result<(), FrameError> {
        let found = checksum(self.seed, payload);
        if found == self.checksum { Ok(()) } else { Err(FrameError::Checksum { expected: self.checksum, found }) }
    }
}

/// The header of a frame whose payload, already packed by `codec`, is `payload`.
pub fn encode_header(head: &FrameHead, codec: Codec, payload: &[u8]) -> [u8; HEADER_BYTES] {
    let mut out = [0; HEADER_BYTES];
    out[0] = VERSION;
    out[1] = head.dtype as u8;
    out[2] = codec as u8;
    out[3] = u8::from(head.last);
    out[4..6].copy_from_slice(&head.route.part.to_le_bytes());
    // 6..8: reserved, zero.
    out[8..16].copy_from_slice(&head.route.job.to_le_bytes());
    out[16..20].copy_from_slice(&head.route.epoch.counter.to_le_bytes());
    out[20..24].copy_from_slice(&head.count.to_le_bytes());
    out[24..40].copy_from_slice(&head.route.epoch.issuer);
    out[40..48].copy_from_slice(&head.channel.to_le_bytes());
    out[48..52].copy_from_slice(&head.cursor.to_le_bytes());
    out[52..56].copy_from_slice(&head.width.to_le_bytes());
    // Senders refuse payloads above PAYLOAD_BYTES_MAX, so that both lengths fit.
    out[56..60].copy_from_slice(&u32::try_from(head.raw_bytes()).unwrap_or(u32::MAX).to_le_bytes());
    out[60..64].copy_from_slice(&u32::try_from(payload.len()).unwrap_or(u32::MAX).to_le_bytes());
    let seed = crc32fast::hash(&out[..64]);
    out[64..].copy_from_slice(&checksum(seed, payload).to_le_bytes());
    out
}

/// A header as found, before anything is known about what it should be.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RawHeader {
    /// What it says about itself.
    pub head: FrameHead,
    codec: Codec,
    raw_length: u32,
    wire_length: u32,
    checksum: u32,
    seed: u32,
}

/// Reads the fixed fields.
///
/// # Errors
/// Another version, an unknown dtype or codec, reserved bits set.
pub fn decode_header(bytes: &[u8; HEADER_BYTES]) -> Result<RawHeader, FrameError> {
    let mut r = Reader::new(bytes);
    read_header(&mut r, crc32fast::hash(&bytes[..64])).unwrap_or(Err(FrameError::Reserved))
}

/// `None` never happens: the array is long enough for every field.
fn read_header(r: &mut Reader<'_>, seed: u32) -> Option<Result<RawHeader, FrameError>> {
    let (version, dtype, codec, flags) = (r.u8()?, r.u8()?, r.u8()?, r.u8()?);
    if version != VERSION {
        return Some(Err(FrameError::Version { found: version }));
    }
    let Some(dtype) = Dtype::from_wire(dtype) else { return Some(Err(FrameError::Dtype { found: dtype })) };
    let Some(codec) = Codec::from_wire(codec) else { return Some(Err(FrameError::Codec { found: codec })) };
    let (part, reserved, job, counter, count) = (r.u16()?, r.u16()?, r.u64()?, r.u32()?, r.u32()?);
    if flags > 1 || reserved != 0 {
        return Some(Err(FrameError::Reserved));
    }
    let issuer = r.array()?;
    let (channel, cursor, width) = (r.u64()?, r.u32()?, r.u32()?);
    let (raw_length, wire_length, checksum) = (r.u32()?, r.u32()?, r.u32()?);
    let route = Route { job, epoch: Epoch { counter, issuer }, part };
    let head = FrameHead { route, channel, cursor, count, last: flags == 1, dtype, width };
    Some(Ok(RawHeader { head, codec, raw_length, wire_length, checksum, seed }))
}

impl RawHeader {
    /// Compares with what the job may send. After this, allocating `raw_length` bytes is safe.
    ///
    /// # Errors
    /// What differs.
    pub fn check(self, expected: &Expectation) -> Result<Incoming, FrameError> {
        let RawHeader { head, codec, raw_length, wire_length, checksum, seed } = self;
        if !expected.dtypes.contains(&head.dtype) {
            return Err(FrameError::Dtype { found: head.dtype as u8 });
        }
        if !expected.codecs.contains(&codec) {
            return Err(FrameError::Codec { found: codec as u8 });
        }
        if head.width != expected.width || head.count == 0 || head.count > expected.count_max {
            let (width, count_max) = (expected.width, expected.count_max);
            return Err(FrameError::Shape { count: head.count, found: head.width, count_max, width });
        }
        if head.cursor.checked_add(head.count).is_none() {
            return Err(FrameError::Cursor { cursor: head.cursor, count: head.count });
        }
        let raw = head.raw_bytes();
        let wire_fits = match codec {
            Codec::Raw => u64::from(wire_length) == raw,
            // A packed payload that is not smaller is sent raw.
            Codec::ShuffledZstd => (1..raw).contains(&u64::from(wire_length)),
        };
        if u64::from(raw_length) != raw || !wire_fits || raw > expected.bytes_max() {
            return Err(FrameError::Length { expected: raw, raw: raw_length, wire: wire_length });
        }
        let (wire_length, raw_length) = (wire_length as usize, raw_length as usize);
        Ok(Incoming { head, codec, wire_length, raw_length, checksum, seed })
    }
}

/// Covers the header (through `seed`) and the payload.
fn checksum(seed: u32, payload: &[u8]) -> u32 {
    let mut hasher = crc32fast::Hasher::new_with_initial(seed);
    hasher.update(payload);
    hasher.finalize()
}

/// f32 values of a payload, whatever its alignment. Trailing bytes that make no value are dropped.
pub fn to_f32(payload: &[u8]) -> Vec<f32> {
    payload.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
}

/// u32 values of a payload, whatever its alignment. Trailing bytes that make no value are dropped.
pub fn to_u32(payload: &[u8]) -> Vec<u32> {
    payload.as_chunks().0.iter().map(|bytes| u32::from_le_bytes(*bytes)).collect()
}

/// A payload of f32 values.
pub fn from_f32(values: &[f32]) -> Bytes {
    let mut out = vec![0; 4 * values.len()];
    out.as_chunks_mut().0.iter_mut().zip(values).for_each(|(bytes, value)| *bytes = value.to_le_bytes());
    out.into()
}

/// A payload of u32 values.
pub fn from_u32(values: &[u32]) -> Bytes {
    let mut out = vec![0; 4 * values.len()];
    out.as_chunks_mut().0.iter_mut().zip(values).for_each(|(bytes, value)| *bytes = value.to_le_bytes());
    out.into()
}

/// Frame format.
const VERSION: u8 = 1;

/// Why a frame is refused. The connection that brought it is closed: a member never sends such a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum FrameError {
    /// Another format.
    #[error("frame format {found}, expected {VERSION}")]
    Version {
        /// Its format.
        found: u8,
    },
    /// A kind of element that the job does not send.
    #[error("frame of dtype {found}, which its job does not send")]
    Dtype {
        /// On the wire.
        found: u8,
    },
    /// A packing that the job does not use.
    #[error("frame of codec {found}, which its job does not use")]
    Codec {
        /// On the wire.
        found: u8,
    },
    /// Bits that mean nothing yet are set.
    #[error("frame with reserved bits set")]
    Reserved,
    /// Rows that do not fit the job.
    #[error("frame of {count} x {found}, expected 1 to {count_max} rows of width {width}")]
    Shape {
        /// Rows.
        count: u32,
        /// Its width.
        found: u32,
        /// Rows at most.
        count_max: u32,
        /// The job's width.
        width: u32,
    },
    /// Positions that wrap around.
    #[error("a frame of {count} from cursor {cursor}: expected their sum within 32 bits")]
    Cursor {
        /// First.
        cursor: u32,
        /// How many.
        count: u32,
    },
    /// Lengths that do not follow from the shape.
    #[error("frame of {raw} bytes ({wire} on the wire), its shape has {expected}")]
    Length {
        /// From the shape.
        expected: u64,
        /// As declared.
        raw: u32,
        /// As sent.
        wire: u32,
    },
    /// The bytes are not those that were sent.
    #[error("frame with checksum {found:08x}, its header says {expected:08x}")]
    Checksum {
        /// Declared.
        expected: u32,
        /// Of the bytes.
        found: u32,
    },
    /// The packed payload does not unpack to exactly the declared length.
    #[error("frame whose payload does not unpack to its declared {raw} bytes")]
    Packed {
        /// Declared.
        raw: usize,
    },
    /// A frame on the stream of another route.
    #[error("frame of another job, epoch or part than its stream")]
    Route,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fuzz::Noise;

    fn head() -> FrameHead {
        let route = Route { job: 7, epoch: Epoch { counter: 3, issuer: [5; 16] }, part: 2 };
        FrameHead { route, channel: 9, cursor: 40, count: 2, last: true, dtype: Dtype::F32, width: 3 }
    }

    fn expected() -> Expectation {
        Expectation::hidden(3, 4)
    }

    fn payload() -> Bytes {
        from_f32(&[1.0, -2.0, f32::NAN, 0.0, 1e-40, f32::INFINITY])
    }

    /// Checks a header in which `change` was made, with a checksum that fits.
    fn checked(change: impl Fn(&mut [u8; HEADER_BYTES])) -> Result<Incoming, FrameError> {
        let mut bytes = encode_header(&head(), Codec::Raw, &payload());
        change(&mut bytes);
        decode_header(&bytes)?.check(&expected())
    }

    #[test]
    fn a_frame_survives() {
        let payload = payload();
        let incoming = checked(|_| {}).unwrap();
        assert_eq!(incoming.head, head());
        assert_eq!((incoming.wire_length, incoming.raw_length), (24, 24));
        assert_eq!(incoming.check(&payload), Ok(()));
        let bits = |v: &[f32]| v.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&to_f32(&payload)), bits(&[1.0, -2.0, f32::NAN, 0.0, 1e-40, f32::INFINITY]));
        assert_eq!(to_u32(&from_u32(&[1, u32::MAX])), [1, u32::MAX]);
    }

    #[test]
    fn what_does_not_fit_is_told() {
        assert_eq!(checked(|b| b[0] = 9), Err(FrameError::Version { found: 9 }));
        assert_eq!(checked(|b| b[1] = 77), Err(FrameError::Dtype { found: 77 }));
        assert_eq!(checked(|b| b[1] = Dtype::F16 as u8), Err(FrameError::Dtype { found: 2 }));
        assert_eq!(checked(|b| b[2] = 2), Err(FrameError::Codec { found: 2 }));
        assert_eq!(checked(|b| b[3] = 2), Err(FrameError::Reserved));
        assert_eq!(checked(|b| b[6] = 1), Err(FrameError::Reserved));
        assert!(matches!(checked(|b| b[52] = 4), Err(FrameError::Shape { found: 4, .. })));
        assert!(matches!(checked(|b| b[20] = 0), Err(FrameError::Shape { count: 0, .. })));
        assert!(matches!(checked(|b| b[20] = 5), Err(FrameError::Shape { count: 5, .. })));
        assert!(matches!(checked(|b| b[48..52].fill(255)), Err(FrameError::Cursor { .. })));
        assert!(matches!(checked(|b| b[56] = 25), Err(FrameError::Length { raw: 25, .. })));
        assert!(matches!(checked(|b| b[60] = 23), Err(FrameError::Length { wire: 23, .. })));
        // A packed payload as large as the raw one, or empty, is a lie too.
        assert!(matches!(checked(|b| b[2] = 1), Err(FrameError::Length { .. })));
        let empty = |b: &mut [u8; HEADER_BYTES]| {
            b[2] = 1;
            b[60..64].fill(0);
        };
        assert!(matches!(checked(empty), Err(FrameError::Length { wire: 0, .. })));
    }

    #[test]
    fn nothing_larger_than_expected_passes() {
        let mut wide = expected();
        wide.width = u32::MAX;
        wide.count_max = u32::MAX;
        let huge = FrameHead { width: u32::MAX, count: 3, cursor: 0, ..head() };
        let bytes = encode_header(&huge, Codec::Raw, &[]);
        assert!(matches!(decode_header(&bytes).unwrap().check(&wide), Err(FrameError::Length { .. })));
        assert_eq!(wide.bytes_max(), PAYLOAD_BYTES_MAX as u64);
    }

    #[test]
    fn the_checksum_covers_header_and_payload() {
        let payload = payload();
        let good = encode_header(&head(), Codec::Raw, &payload);
        for bit in 0..HEADER_BYTES * 8 {
            let mut bad = good;
            bad[bit / 8] ^= 1 << (bit % 8);
            let passed = decode_header(&bad).and_then(|h| h.check(&expected())).and_then(|i| i.check(&payload));
            assert!(passed.is_err(), "header bit {bit}");
        }
        let incoming = decode_header(&good).unwrap().check(&expected()).unwrap();
        for bit in 0..payload.len() * 8 {
            let mut bad = payload.to_vec();
            bad[bit / 8] ^= 1 << (bit % 8);
            assert!(matches!(incoming.check(&bad), Err(FrameError::Checksum { .. })), "payload bit {bit}");
        }
    }

    #[test]
    fn noise_never_panics_nor_asks_for_memory() {
        let good = encode_header(&head(), Codec::Raw, &payload());
        let mut noise = Noise::new(3);
        for _ in 0..50_000 {
            let mut bytes = noise.mangle(&good);
            bytes.resize(HEADER_BYTES, 0);
            let bytes: [u8; HEADER_BYTES] = bytes.try_into().unwrap();
            if let Ok(incoming) = decode_header(&bytes).and_then(|h| h.check(&expected())) {
                assert!(incoming.raw_length as u64 <= expected().bytes_max());
                assert!(incoming.wire_length <= incoming.raw_length);
            }
        }
    }
}
