//! Which encodings a model is served with, and files that are no measurement of it.
use super::*;
use partitioner::Work;

fn quality(codec: &str, top1: f64) -> Quality {
    Quality {
        codec: codec.into(),
        cuts: vec![1],
        positions: 4096,
        kl_mean: 0.001,
        kl_max: 0.1,
        top1,
        flips: 4,
        flip_margin_max: 0.1,
        greedy: 0.5,
    }
}

fn spec() -> ModelSpec {
    let work = Work {
        layers: Vec::new(),
        embed_bytes: 0,
        head_bytes: 0,
        tied: false,
        head_flops: 0,
        activation_bytes: 2304,
        coarser_bytes: Vec::new(),
        context: 64,
        sequences: 1,
        scratch_bytes: 0,
    };
    ModelSpec {
        content: MODEL,
        name: "m".into(),
        work,
        width: 576,
        boundary: Vec::new(),
        int8: true,
        eos: Vec::new(),
        replicas: 1,
        draft: None,
    }
}

const MODEL: ContentId = ContentId([1; 32]);

#[test]
fn an_encoding_is_allowed_if_it_passes_with_every_number_of_cuts() {
    let all = [("f16", 1.0), ("f16", 0.99), ("q8", 0.97), ("q8", 0.94), ("q4", 0.96), ("q4", 0.951)];
    let gate = Gate::new(MODEL, "m".into(), all.map(|(codec, top1)| quality(codec, top1)).into());
    assert_eq!(gate.allowed, ["f16", "q4"]);
    assert_eq!(gate.codecs(), [Codec::F16, Codec::Q4]);
    let fail = || Err::<Vec<Codec>, _>("not read");
    assert_eq!(Boundary::Q8.codecs(fail), Ok(vec![Codec::Q8]));
    assert_eq!(Boundary::Auto.codecs(fail), Err("not read"));
    let auto = Boundary::Auto.codecs(|| Ok::<_, ()>(gate.codecs())).unwrap();
    assert_eq!(auto, [Codec::Lossless, Codec::F16, Codec::Q4]);
}

#[test]
fn plans_may_choose_among_the_encodings_of_the_spec() {
    let mut spec = spec();
    offer(&mut spec, &[Codec::Lossless, Codec::F16, Codec::Q4]);
    assert_eq!((spec.work.activation_bytes, &spec.work.coarser_bytes[..]), (2304, &[1154, 323][..]));
    assert_eq!(Boundary::of(&spec), Boundary::Auto);
    spec.fix_row(323);
    assert_eq!((spec.row(), Boundary::of(&spec)), (RowFormat { codec: RowCodec::Q4, bytes: 323 }, Boundary::Q4));
    assert_eq!((spec.work.activation_bytes, spec.work.coarser_bytes.len()), (323, 0));
    assert_eq!(check(spec.row(), 576), Ok(()));
    assert!(check(spec.row(), 577).unwrap_err().contains("expected"));
    // Of a row that narrow the blocks of 4 bits take more than half precision.
    spec.width = 8;
    offer(&mut spec, &Codec::ALL);
    assert_eq!(spec.boundary.iter().map(|row| row.bytes).collect::<Vec<_>>(), [32, 18]);
}

#[test]
fn a_measurement_of_another_model_or_a_damaged_one_says_what_to_do() {
    let dir = tempfile::tempdir().unwrap();
    let read = || Gate::read(dir.path(), MODEL, "m");
    assert!(read().unwrap_err().to_string().ends_with("run `meshnode gate m` first"));
    let gate = Gate::new(MODEL, "m".into(), vec![quality("q8", 1.0)]);
    let path = gate.write(dir.path(), MODEL).unwrap();
    assert_eq!(read().unwrap(), gate);
    let other = Gate::new(ContentId([2; 32]), "other".into(), Vec::new());
    let damages = [
        (serde_json::to_vec(&other).unwrap(), "found that of other"),
        (serde_json::to_vec(&Gate { format: 2, ..gate.clone() }).unwrap(), "expected format 1, found 2"),
        (serde_json::to_vec(&Gate { allowed: vec!["q3".into()], ..gate.clone() }).unwrap(), "found `q3`"),
        (b"{".to_vec(), "EOF"),
        (vec![b' '; 65 << 10], "expected at most"),
    ];
    for (bytes, words) in damages {
        std::fs::write(&path, bytes).unwrap();
        let error = read().unwrap_err().to_string();
        assert!(error.contains(words) && error.ends_with("delete it, and run `meshnode gate m`"), "{error}");
    }
    gate.write(dir.path(), MODEL).unwrap();
    assert_eq!(read().unwrap(), gate);
}
