//! Speed of each encoding of rows on one core: `cargo run --release -p kernels --example rows [WIDTH]`.
use kernels::bench::fastest;
use kernels::boundary::Codec;
use std::hint::black_box;
use std::io::Write;
use std::time::Duration;

/// Rows per pass: few, so that one pass in several is undisturbed on a machine that does other work, too.
const ROWS: usize = 32;
const LIMIT: Duration = Duration::from_secs(1);

fn main() -> std::io::Result<()> {
    let mut out = std::io::stdout();
    let given: Option<usize> = std::env::args().nth(1).map(|text| text.parse().expect("elements of a row"));
    writeln!(out, "codec       width   encode GB/s   µs/row   decode GB/s   µs/row   (GB of f32, one core)")?;
    for width in given.map_or(vec![576, 4096], |width| vec![width]) {
        let rows = hidden(width);
        for codec in Codec::ALL {
            let coded = codec.encode(width, &rows);
            let encode = fastest(LIMIT, || drop(black_box(codec.encode(width, black_box(&rows)))));
            let decode = fastest(LIMIT, || drop(black_box(codec.decode(width, black_box(&coded)))));
            let figures = |seconds: f64| (size_of_val(&rows[..]) as f64 / seconds / 1e9, seconds / ROWS as f64 * 1e6);
            let ((encode, encode_us), (decode, decode_us)) = (figures(encode), figures(decode));
            let name = codec.name();
            writeln!(out, "{name:9} {width:7} {encode:13.3} {encode_us:8.1} {decode:13.3} {decode_us:8.1}")?;
        }
    }
    Ok(())
}

/// Rows as language models have them: roughly Gaussian, and a few channels a hundred times larger.
fn hidden(width: usize) -> Vec<f32> {
    let mut state = 1u64;
    let mut uniform = || {
        state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
        (state >> 40) as f32 / (1u64 << 24) as f32
    };
    let mut rows: Vec<f32> = (0..ROWS * width).map(|_| (0..12).map(|_| uniform()).sum::<f32>() - 6.0).collect();
    for row in rows.chunks_exact_mut(width) {
        (row[3], row[width / 2], row[width - 1]) = (150.0, -90.0, 40.0);
    }
    rows
}
