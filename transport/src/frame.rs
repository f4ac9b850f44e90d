//! The wire format of a frame: a fixed little-endian header, then the payload. The header is validated against the
//! expectation of its route before any payload byte is read or allocated.
use crate::identity::NodeId;
use crate::wire::Reader;
use bytes::Bytes;
use thiserror::Error;

/// Size of the header in bytes.
pub const HEADER_BYTES: usize = 80;
/// Largest payload of any job: 512 positions of a model of width 16,384 in f32. An [`Expectation`] can only lower it.
pub const PAYLOAD_BYTES_MAX: usize = 32 << 20;

/// Header flags.
const FLAG_LAST: u8 = 1;
const FLAG_CONTINUES: u8 = 2;

/// One version of a job's placement: (counter, issuer), ordered lexicographically.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Epoch {
    /// Incremented by each re-plan.
    pub counter: u32,
    /// The node that issued the epoch.
    pub issuer: NodeId,
}

/// The stream that carries a frame: one per job, epoch, receiving part and priority.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Route {
    /// The job.
    pub job: u64,
    /// The epoch of its placement.
    pub epoch: Epoch,
    /// The receiving part of the job.
    pub part: u16,
}

/// The descriptive fields of a frame header. The encoder adds lengths, codec and checksum; the decoder checks them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct WireHeader {
    /// The stream.
    pub route: Route,
    /// The input of the receiving part: a request of a stage, or a link of a tile.
    pub channel: u64,
    /// Offset within the channel: the first position of a stage, or the step of a tile.
    pub cursor: u32,
    /// Rows of a stage, one per position; elements of a tile's halo strip.
    pub count: u32,
    /// Whether the last row is the channel's newest row at the source: the last stage of a model samples from it.
    pub last: bool,
    /// A channel with the same content before `cursor`, which the receiver has.
    pub continues: Option<u64>,
    /// Rows of draft tokens at the end of the frame.
    pub drafts: u8,
    /// Drafts of an earlier frame that end at `cursor` and were right.
    pub kept: u8,
    /// Number of the channel's frames with drafts before this one.
    pub round: u32,
    /// Element type.
    pub dtype: Dtype,
    /// Elements per row.
    pub width: u32,
}

impl WireHeader {
    /// Payload bytes before compression.
    pub fn raw_bytes(&self) -> u64 {
        u64::from(self.count) * u64::from(self.width) * self.dtype.bytes()
    }
}

/// Element type.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Dtype {
    /// Token ids.
    U32 = 0,
    /// Hidden activations in 32-bit floats.
    F32 = 1,
    /// IEEE half precision.
    F16 = 2,
    /// bfloat16.
    Bf16 = 3,
    /// Grid cells of 32 bits.
    Cells = 4,
    /// Grid cells of one bit, eight per element.
    Bits = 5,
    /// Grid cells of 16 bits.
    HalfCells = 6,
    /// Bytes of hidden rows with elements of 16 bits; a row's width is its bytes. What they mean is the job's business.
    Rows16 = 7,
    /// Bytes of hidden rows with elements of 8 bits.
    Rows8 = 8,
    /// Bytes of hidden rows with elements of 4 bits.
    Rows4 = 9,
}

impl Dtype {
    /// All of them.
    pub const ALL: [Dtype; 10] = [
        Dtype::U32,
        Dtype::F32,
        Dtype::F16,
        Dtype::Bf16,
        Dtype::Cells,
        Dtype::Bits,
        Dtype::HalfCells,
        Dtype::Rows16,
        Dtype::Rows8,
        Dtype::Rows4,
    ];

    /// Bytes of one element.
    pub fn bytes(self) -> u64 {
        match self {
            Dtype::U32 | Dtype::F32 | Dtype::Cells => 4,
            Dtype::F16 | Dtype::Bf16 | Dtype::HalfCells => 2,
            Dtype::Bits | Dtype::Rows16 | Dtype::Rows8 | Dtype::Rows4 => 1,
        }
    }

    fn from_wire(byte: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|d| *d as u8 == byte)
    }
}

/// Payload compression: lossless, and chosen by the sender for each frame. (What hidden rows are rounded to is their [`Dtype`].)
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Codec {
    /// Uncompressed.
    Raw = 0,
    /// Byte shuffle (bytes of equal significance side by side), then zstd: lossless.
    ShuffledZstd = 1,
}

impl Codec {
    fn from_wire(byte: u8) -> Option<Self> {
        [Codec::Raw, Codec::ShuffledZstd].into_iter().find(|c| *c as u8 == byte)
    }
}

/// The frames that a job may send on a stream. Registered before the stream is read.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Expectation {
    /// Elements per row.
    pub width: u32,
    /// Maximum rows per frame.
    pub count_max: u32,
    /// Allowed element types.
    pub dtypes: Vec<Dtype>,
    /// Allowed codecs.
    pub codecs: Vec<Codec>,
}

impl Expectation {
    /// Hidden rows of one element type: `width` elements of f32 or, encoded, bytes per row.
    pub fn hidden(dtype: Dtype, width: u32, count_max: u32) -> Self {
        Self { width, count_max, dtypes: vec![dtype], codecs: vec![Codec::Raw, Codec::ShuffledZstd] }
    }

    /// Token ids for the first stage.
    pub fn tokens(count_max: u32) -> Self {
        Self { width: 1, count_max, dtypes: vec![Dtype::U32], codecs: vec![Codec::Raw, Codec::ShuffledZstd] }
    }

    /// Halo strips of a grid, of at most `elements_max` elements each.
    pub fn halo_strips(dtype: Dtype, elements_max: u32) -> Self {
        Self { width: 1, count_max: elements_max, dtypes: vec![dtype], codecs: vec![Codec::Raw, Codec::ShuffledZstd] }
    }

    /// Largest payload in bytes that this expectation allows.
    pub fn bytes_max(&self) -> u64 {
        let element = self.dtypes.iter().map(|d| d.bytes()).max().unwrap_or(0);
        (u64::from(self.width) * u64::from(self.count_max)).saturating_mul(element).min(PAYLOAD_BYTES_MAX as u64)
    }
}

/// A validated header: what to read next.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Incoming {
    /// The header fields.
    pub head: WireHeader,
    /// Codec of the payload.
    pub codec: Codec,
    /// Payload bytes on the wire: at most `raw_length`.
    pub wire_length: usize,
    /// Payload bytes after decompression: implied by the shape and bounded by the expectation.
    pub raw_length: usize,
    checksum: u32,
    seed: u32,
}

impl Incoming {
    /// Verifies the checksum of the received payload.
    ///
    /// # Errors
    /// [`FrameError::Checksum`].
    pub fn check(&self, payload: &[u8]) -> Result<(), FrameError> {
        let found = checksum(self.seed, payload);
        if found == self.checksum { Ok(()) } else { Err(FrameError::Checksum { expected: self.checksum, found }) }
    }
}

/// Encodes the header of a frame whose payload has already been compressed with `codec`.
pub fn encode_header(head: &WireHeader, codec: Codec, payload: &[u8]) -> [u8; HEADER_BYTES] {
    let mut out = [0; HEADER_BYTES];
    out[0] = VERSION;
    out[1] = head.dtype as u8;
    out[2] = codec as u8;
    out[3] = if head.last { FLAG_LAST } else { 0 } | if head.continues.is_some() { FLAG_CONTINUES } else { 0 };
    out[4..6].copy_from_slice(&head.route.part.to_le_bytes());
    out[6..8].copy_from_slice(&[head.drafts, head.kept]);
    out[8..16].copy_from_slice(&head.route.job.to_le_bytes());
    out[16..20].copy_from_slice(&head.route.epoch.counter.to_le_bytes());
    out[20..24].copy_from_slice(&head.count.to_le_bytes());
    out[24..40].copy_from_slice(&head.route.epoch.issuer);
    out[40..48].copy_from_slice(&head.channel.to_le_bytes());
    out[48..52].copy_from_slice(&head.cursor.to_le_bytes());
    out[52..56].copy_from_slice(&head.width.to_le_bytes());
    // Senders reject payloads above PAYLOAD_BYTES_MAX, so both lengths fit in 32 bits.
    out[56..60].copy_from_slice(&u32::try_from(head.raw_bytes()).unwrap_or(u32::MAX).to_le_bytes());
    out[60..64].copy_from_slice(&u32::try_from(payload.len()).unwrap_or(u32::MAX).to_le_bytes());
    out[64..72].copy_from_slice(&head.continues.unwrap_or(0).to_le_bytes());
    out[72..76].copy_from_slice(&head.round.to_le_bytes());
    let seed = crc32fast::hash(&out[..HEADER_BYTES - 4]);
    out[HEADER_BYTES - 4..].copy_from_slice(&checksum(seed, payload).to_le_bytes());
    out
}

/// A decoded header that has not been compared with an expectation yet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RawHeader {
    /// The header fields.
    pub head: WireHeader,
    codec: Codec,
    raw_length: u32,
    wire_length: u32,
    checksum: u32,
    seed: u32,
}

/// Decodes the fixed fields.
///
/// # Errors
/// Unknown format version, dtype or codec, or reserved bits set.
pub fn decode_header(bytes: &[u8; HEADER_BYTES]) -> Result<RawHeader, FrameError> {
    let mut r = Reader::new(bytes);
    read_header(&mut r, crc32fast::hash(&bytes[..HEADER_BYTES - 4])).unwrap_or(Err(FrameError::Reserved))
}

/// Never returns `None`: the array is long enough for every field.
fn read_header(r: &mut Reader<'_>, seed: u32) -> Option<Result<RawHeader, FrameError>> {
    let (version, dtype, codec, flags) = (r.u8()?, r.u8()?, r.u8()?, r.u8()?);
    if version != VERSION {
        return Some(Err(FrameError::Version { found: version }));
    }
    let Some(dtype) = Dtype::from_wire(dtype) else { return Some(Err(FrameError::Dtype { found: dtype })) };
    let Some(codec) = Codec::from_wire(codec) else { return Some(Err(FrameError::Codec { found: codec })) };
    let (part, drafts, kept, job, counter, count) = (r.u16()?, r.u8()?, r.u8()?, r.u64()?, r.u32()?, r.u32()?);
    if flags & !(FLAG_LAST | FLAG_CONTINUES) != 0 {
        return Some(Err(FrameError::Reserved));
    }
    let issuer = r.array()?;
    let (channel, cursor, width) = (r.u64()?, r.u32()?, r.u32()?);
    let (raw_length, wire_length, other, round, checksum) = (r.u32()?, r.u32()?, r.u64()?, r.u32()?, r.u32()?);
    let continues = (flags & FLAG_CONTINUES != 0).then_some(other);
    if continues.is_none() && other != 0 {
        return Some(Err(FrameError::Reserved));
    }
    let route = Route { job, epoch: Epoch { counter, issuer }, part };
    let last = flags & FLAG_LAST != 0;
    let head = WireHeader { route, channel, cursor, count, last, continues, drafts, kept, round, dtype, width };
    Some(Ok(RawHeader { head, codec, raw_length, wire_length, checksum, seed }))
}

impl RawHeader {
    /// Compares the header with what the job may send. Afterwards it is safe to allocate `raw_length` bytes.
    ///
    /// # Errors
    /// The first field that differs.
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
            // A payload that does not shrink is sent raw, so a compressed one must be smaller.
            Codec::ShuffledZstd => (1..raw).contains(&u64::from(wire_length)),
        };
        if u64::from(raw_length) != raw || !wire_fits || raw > expected.bytes_max() {
            return Err(FrameError::Length { expected: raw, raw: raw_length, wire: wire_length });
        }
        let (wire_length, raw_length) = (wire_length as usize, raw_length as usize);
        Ok(Incoming { head, codec, wire_length, raw_length, checksum, seed })
    }
}

/// CRC32 of the header (through `seed`) and the payload.
fn checksum(seed: u32, payload: &[u8]) -> u32 {
    let mut hasher = crc32fast::Hasher::new_with_initial(seed);
    hasher.update(payload);
    hasher.finalize()
}

/// Decodes f32 values from a payload of any alignment. Trailing bytes that do not fill a value are dropped.
pub fn to_f32(payload: &[u8]) -> Vec<f32> {
    payload.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
}

/// Decodes u32 values from a payload of any alignment. Trailing bytes that do not fill a value are dropped.
pub fn to_u32(payload: &[u8]) -> Vec<u32> {
    payload.as_chunks().0.iter().map(|bytes| u32::from_le_bytes(*bytes)).collect()
}

/// Encodes f32 values as a payload.
pub fn from_f32(values: &[f32]) -> Bytes {
    let mut out = vec![0; 4 * values.len()];
    out.as_chunks_mut().0.iter_mut().zip(values).for_each(|(bytes, value)| *bytes = value.to_le_bytes());
    out.into()
}

/// Encodes u32 values as a payload.
pub fn from_u32(values: &[u32]) -> Bytes {
    let mut out = vec![0; 4 * values.len()];
    out.as_chunks_mut().0.iter_mut().zip(values).for_each(|(bytes, value)| *bytes = value.to_le_bytes());
    out.into()
}

/// Version of the frame format.
const VERSION: u8 = 3;

/// Why a frame is rejected. The receiver closes the connection, because a correct member never sends such a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum FrameError {
    /// Unknown format version.
    #[error("frame format {found}, expected {VERSION}")]
    Version {
        /// Version found.
        found: u8,
    },
    /// An element type that the job does not send.
    #[error("frame of dtype {found}, which its job does not send")]
    Dtype {
        /// Code on the wire.
        found: u8,
    },
    /// A codec that the job does not use.
    #[error("frame of codec {found}, which its job does not use")]
    Codec {
        /// Code on the wire.
        found: u8,
    },
    /// Reserved bits are set.
    #[error("frame with reserved bits set")]
    Reserved,
    /// A shape outside the job's expectation.
    #[error("frame of {count} x {found}, expected 1 to {count_max} rows of width {width}")]
    Shape {
        /// Rows found.
        count: u32,
        /// Width found.
        found: u32,
        /// Maximum rows.
        count_max: u32,
        /// Expected width.
        width: u32,
    },
    /// Cursor plus row count overflows 32 bits.
    #[error("frame of {count} rows from cursor {cursor}: the end does not fit in 32 bits")]
    Cursor {
        /// First position.
        cursor: u32,
        /// Rows.
        count: u32,
    },
    /// Lengths that contradict the shape.
    #[error("frame of {raw} bytes ({wire} on the wire), its shape implies {expected}")]
    Length {
        /// Bytes implied by the shape.
        expected: u64,
        /// Declared uncompressed bytes.
        raw: u32,
        /// Declared bytes on the wire.
        wire: u32,
    },
    /// Checksum mismatch: the bytes were damaged in transit.
    #[error("frame with checksum {found:08x}, its header declares {expected:08x}")]
    Checksum {
        /// Checksum in the header.
        expected: u32,
        /// Checksum of the received bytes.
        found: u32,
    },
    /// The payload does not decompress to exactly the declared length.
    #[error("frame whose payload does not unpack to its declared {raw} bytes")]
    Packed {
        /// Declared bytes.
        raw: usize,
    },
    /// A frame whose route differs from that of its stream.
    #[error("frame of another job, epoch or part than its stream")]
    Route,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fuzz::Noise;

    fn head() -> WireHeader {
        let route = Route { job: 7, epoch: Epoch { counter: 3, issuer: [5; 16] }, part: 2 };
        WireHeader {
            route,
            channel: 9,
            cursor: 40,
            count: 2,
            last: true,
            continues: Some(7),
            drafts: 1,
            kept: 2,
            round: 300,
            dtype: Dtype::F32,
            width: 3,
        }
    }

    fn expected() -> Expectation {
        Expectation::hidden(Dtype::F32, 3, 4)
    }

    fn payload() -> Bytes {
        from_f32(&[1.0, -2.0, f32::NAN, 0.0, 1e-40, f32::INFINITY])
    }

    /// Applies `change` to a valid header, then decodes and checks it. The payload checksum is not verified here.
    fn checked(change: impl Fn(&mut [u8; HEADER_BYTES])) -> Result<Incoming, FrameError> {
        let mut bytes = encode_header(&head(), Codec::Raw, &payload());
        change(&mut bytes);
        decode_header(&bytes)?.check(&expected())
    }

    #[test]
    fn a_frame_round_trips() {
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
    fn each_mismatch_has_its_own_error() {
        assert_eq!(checked(|b| b[0] = 9), Err(FrameError::Version { found: 9 }));
        assert_eq!(checked(|b| b[1] = 77), Err(FrameError::Dtype { found: 77 }));
        assert_eq!(checked(|b| b[1] = Dtype::F16 as u8), Err(FrameError::Dtype { found: 2 }));
        assert_eq!(checked(|b| b[2] = 2), Err(FrameError::Codec { found: 2 }));
        assert_eq!(checked(|b| b[3] = 4), Err(FrameError::Reserved));
        assert_eq!(checked(|b| b[3] = FLAG_LAST), Err(FrameError::Reserved), "a channel that is not announced");
        assert!(matches!(checked(|b| b[52] = 4), Err(FrameError::Shape { found: 4, .. })));
        assert!(matches!(checked(|b| b[20] = 0), Err(FrameError::Shape { count: 0, .. })));
        assert!(matches!(checked(|b| b[20] = 5), Err(FrameError::Shape { count: 5, .. })));
        assert!(matches!(checked(|b| b[48..52].fill(255)), Err(FrameError::Cursor { .. })));
        assert!(matches!(checked(|b| b[56] = 25), Err(FrameError::Length { raw: 25, .. })));
        assert!(matches!(checked(|b| b[60] = 23), Err(FrameError::Length { wire: 23, .. })));
        // A compressed payload must be smaller than the raw one, and not empty.
        assert!(matches!(checked(|b| b[2] = 1), Err(FrameError::Length { .. })));
        let empty = |b: &mut [u8; HEADER_BYTES]| {
            b[2] = 1;
            b[60..64].fill(0);
        };
        assert!(matches!(checked(empty), Err(FrameError::Length { wire: 0, .. })));
    }

    #[test]
    fn encoded_rows_have_the_job_s_encoding_and_its_bytes_per_row() {
        let head = WireHeader { dtype: Dtype::Rows4, width: 323, count: 2, ..head() };
        let bytes = encode_header(&head, Codec::Raw, &[0; 646]);
        let checked = |dtype, width| decode_header(&bytes).and_then(|h| h.check(&Expectation::hidden(dtype, width, 4)));
        assert_eq!(checked(Dtype::Rows4, 323).map(|incoming| incoming.raw_length), Ok(646));
        assert_eq!(checked(Dtype::Rows8, 323), Err(FrameError::Dtype { found: 9 }));
        assert!(matches!(checked(Dtype::Rows4, 324), Err(FrameError::Shape { found: 323, .. })));
    }

    #[test]
    fn nothing_larger_than_expected_passes() {
        let mut wide = expected();
        wide.width = u32::MAX;
        wide.count_max = u32::MAX;
        let huge = WireHeader { width: u32::MAX, count: 3, cursor: 0, ..head() };
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
    fn noise_never_panics_nor_exceeds_the_expected_size() {
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
