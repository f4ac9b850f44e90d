//! Lossless payload compression, and the decision whether to compress. The only user of zstd.
use crate::frame::{Codec, Dtype, FrameError};

/// Smaller payloads are sent raw: a decode row crosses any link faster than zstd starts.
pub const PACK_BYTES_MIN: usize = 64 << 10;
/// Fastest zstd level. Higher ones gain little on shuffled floats and cost several times as much.
const LEVEL: i32 = 1;

/// Compresses with `codec`; `None` if the result would not be smaller.
pub fn pack(codec: Codec, dtype: Dtype, raw: &[u8]) -> Option<Vec<u8>> {
    match codec {
        Codec::Raw => None,
        Codec::ShuffledZstd => {
            let shuffled = shuffle(raw, dtype.bytes() as usize);
            let mut out = vec![0; raw.len()];
            let length = zstd::bulk::compress_to_buffer(&shuffled, &mut out, LEVEL).ok()?;
            if length == 0 || length >= raw.len() {
                return None;
            }
            out.truncate(length);
            Some(out)
        }
    }
}

/// Decompresses to exactly `raw_length` bytes, which also bounds the allocation (twice that, for the shuffle).
///
/// # Errors
/// [`FrameError::Packed`] if the payload is corrupt or its length differs.
pub fn unpack(codec: Codec, dtype: Dtype, packed: Vec<u8>, raw_length: usize) -> Result<Vec<u8>, FrameError> {
    let wrong = FrameError::Packed { raw: raw_length };
    match codec {
        Codec::Raw if packed.len() == raw_length => Ok(packed),
        Codec::Raw => Err(wrong),
        Codec::ShuffledZstd => {
            let mut shuffled = vec![0; raw_length];
            let length = zstd::bulk::decompress_to_buffer(&packed, &mut shuffled).map_err(|_| wrong)?;
            if length != raw_length {
                return Err(wrong);
            }
            Ok(unshuffle(&shuffled, dtype.bytes() as usize))
        }
    }
}

/// Groups all first bytes, then all second bytes, …: exponents end up side by side, which makes floats compressible.
fn shuffle(raw: &[u8], element: usize) -> Vec<u8> {
    match element {
        1 => raw.to_vec(),
        2 => shuffle_elements::<2>(raw),
        _ => shuffle_elements::<4>(raw),
    }
}

fn unshuffle(shuffled: &[u8], element: usize) -> Vec<u8> {
    match element {
        1 => shuffled.to_vec(),
        2 => unshuffle_elements::<2>(shuffled),
        _ => unshuffle_elements::<4>(shuffled),
    }
}

/// Trailing bytes that do not fill an element stay at the end.
fn shuffle_elements<const N: usize>(raw: &[u8]) -> Vec<u8> {
    let (elements, rest) = raw.as_chunks::<N>();
    let mut out = Vec::with_capacity(raw.len());
    (0..N).for_each(|byte| out.extend(elements.iter().map(|element| element[byte])));
    out.extend_from_slice(rest);
    out
}

fn unshuffle_elements<const N: usize>(shuffled: &[u8]) -> Vec<u8> {
    let count = shuffled.len() / N;
    let mut out = shuffled.to_vec();
    let (elements, _) = out.as_chunks_mut::<N>();
    for (byte, plane) in shuffled.chunks_exact(count.max(1)).take(N).enumerate() {
        plane.iter().zip(&mut *elements).for_each(|(from, element)| element[byte] = *from);
    }
    out
}

/// Chooses a codec from payload size, link rate and measured compression.
#[derive(Clone, Copy, Debug)]
pub struct Chooser {
    /// Measured bytes per second of compressing and decompressing together.
    codec_speed: f64,
    /// Measured compressed size over raw size.
    ratio: f64,
}

impl Default for Chooser {
    /// Initial guess before any measurement: 500 MB/s, and activations shrink by a tenth.
    fn default() -> Self {
        Self { codec_speed: 500e6, ratio: 0.9 }
    }
}

impl Chooser {
    /// The codec that delivers `raw_bytes` soonest over a link of `bytes_per_second` (`None`: not measured yet, assumed
    /// fast).
    pub fn choose(&self, raw_bytes: usize, bytes_per_second: Option<u64>) -> Codec {
        let Some(link) = bytes_per_second.filter(|_| raw_bytes >= PACK_BYTES_MIN) else { return Codec::Raw };
        let raw = raw_bytes as f64;
        let plain = raw / (link.max(1) as f64);
        let packed = raw / self.codec_speed + plain * self.ratio;
        if packed < plain { Codec::ShuffledZstd } else { Codec::Raw }
    }

    /// Records one compression: `raw` to `packed` bytes in `seconds`. Decompression takes about a third of that time.
    pub fn learn(&mut self, raw: usize, packed: usize, seconds: f64) {
        const WEIGHT: f64 = 0.2;
        let speed = raw as f64 / (seconds.max(1e-9) * 4.0 / 3.0);
        self.codec_speed += WEIGHT * (speed - self.codec_speed);
        self.ratio += WEIGHT * (packed as f64 / (raw as f64).max(1.0) - self.ratio);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frame;
    use crate::fuzz::Noise;

    fn activations(n: usize) -> Vec<u8> {
        let mut noise = Noise::new(6);
        let values: Vec<f32> = (0..n).map(|_| (noise.below(2000) as f32 - 1000.0) / 512.0).collect();
        frame::from_f32(&values).to_vec()
    }

    #[test]
    fn packing_loses_nothing() {
        for dtype in Dtype::ALL {
            let raw = activations(5_000);
            let packed = pack(Codec::ShuffledZstd, dtype, &raw).unwrap();
            assert!(packed.len() < raw.len());
            assert_eq!(unpack(Codec::ShuffledZstd, dtype, packed, raw.len()).unwrap(), raw);
        }
        let odd = activations(100)[..397].to_vec();
        assert_eq!(unshuffle(&shuffle(&odd, 4), 4), odd);
        assert_eq!(unshuffle(&shuffle(&odd[..1], 2), 2), odd[..1]);
        assert_eq!(pack(Codec::Raw, Dtype::F32, &[1, 2, 3, 4]), None);
        assert_eq!(unpack(Codec::Raw, Dtype::F32, vec![1, 2, 3, 4], 4), Ok(vec![1, 2, 3, 4]));
    }

    #[test]
    fn noise_is_sent_raw() {
        let raw = Noise::new(7).bytes(4096);
        assert_eq!(pack(Codec::ShuffledZstd, Dtype::F32, &raw), None);
        assert_eq!(pack(Codec::ShuffledZstd, Dtype::F32, &[]), None);
    }

    #[test]
    fn zip_bombs_and_truncated_payloads_are_rejected() {
        let bomb = zstd::bulk::compress(&vec![0; 64 << 20], LEVEL).unwrap();
        assert!(bomb.len() < 10_000);
        let wrong = |raw| Err(FrameError::Packed { raw });
        assert_eq!(unpack(Codec::ShuffledZstd, Dtype::F32, bomb, 4096), wrong(4096));
        let packed = pack(Codec::ShuffledZstd, Dtype::F32, &activations(1000)).unwrap();
        assert_eq!(unpack(Codec::ShuffledZstd, Dtype::F32, packed.clone(), 4004), wrong(4004));
        assert_eq!(unpack(Codec::ShuffledZstd, Dtype::F32, packed.clone(), 3996), wrong(3996));
        assert_eq!(unpack(Codec::ShuffledZstd, Dtype::F32, packed[..packed.len() - 1].to_vec(), 4000), wrong(4000));
        assert_eq!(unpack(Codec::Raw, Dtype::F32, vec![0; 3], 4), wrong(4));
    }

    #[test]
    fn damaged_payloads_never_panic() {
        let packed = pack(Codec::ShuffledZstd, Dtype::F32, &activations(500)).unwrap();
        let mut noise = Noise::new(8);
        for _ in 0..5_000 {
            if let Ok(raw) = unpack(Codec::ShuffledZstd, Dtype::F32, noise.mangle(&packed), 2000) {
                assert_eq!(raw.len(), 2000);
            }
        }
    }

    #[test]
    fn only_large_payloads_on_slow_links_are_packed() {
        let chooser = Chooser::default();
        let (slow, fast) = (Some(10_000_000), Some(3_000_000_000));
        assert_eq!(chooser.choose(2304, slow), Codec::Raw);
        assert_eq!(chooser.choose(1 << 20, slow), Codec::ShuffledZstd);
        assert_eq!(chooser.choose(1 << 20, fast), Codec::Raw);
        assert_eq!(chooser.choose(1 << 20, None), Codec::Raw);
        let mut incompressible = chooser;
        (0..100).for_each(|_| incompressible.learn(1 << 20, 1 << 20, 0.002));
        assert_eq!(incompressible.choose(1 << 20, slow), Codec::Raw, "compression does not pay for this data");
    }
}
