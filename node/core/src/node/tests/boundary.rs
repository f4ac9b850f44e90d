//! Encodings of the rows between stages: what a model asks for is ordered, and a choice is made once.
use super::*;
use crate::work::serve::{RowCodec, RowFormat};

const Q4: RowFormat = RowFormat { codec: RowCodec::Q4, bytes: 323 };

/// A row of 100 MB as it is, so that any link is the bottleneck.
fn wide(boundary: &[RowFormat]) -> ModelSpec {
    let mut model = ModelSpec { width: 25_000_000, boundary: boundary.to_vec(), ..model() };
    model.work.activation_bytes = boundary[0].bytes.into();
    model.work.coarser_bytes = boundary[1..].iter().map(|row| row.bytes.into()).collect();
    model
}

fn row(mesh: &Mesh) -> RowFormat {
    match mesh.nodes[&id(1)].node.jobs().next().expect("a job").program {
        ProgramView::Serve { row, .. } => row,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_coarser_encoding_is_chosen_where_it_pays_and_kept() {
    let lossless = RowFormat::lossless(25_000_000);
    for (offered, expected) in [(&[lossless][..], lossless), (&[Q4], Q4), (&[lossless, Q4], Q4)] {
        let mut mesh = Mesh::new(&[225, 225, 225, 225]);
        let job = mesh.deploy_model(wide(offered));
        assert!(mesh.stages().len() > 1, "{offered:?}");
        assert_eq!(row(&mesh), expected, "{offered:?}");
        mesh.submit(CALL, job, vec![1, 2, 3], 20);
        assert_eq!(mesh.finish(CALL, Duration::from_secs(20)), DoneReason::Length);
        assert_eq!(row(&mesh), expected, "{offered:?}");
    }
}

#[test]
fn an_order_with_rows_larger_than_f32_is_unsound() {
    let order = |bytes| StageOrder {
        content: ContentId([7; 32]),
        layers: vec![0..2],
        sequences: 1,
        context: 16,
        width: 4,
        row: RowFormat { codec: RowCodec::Q8, bytes },
        int8: false,
    };
    let why = |bytes| order(bytes).unsound();
    assert_eq!(why(16), None);
    for bytes in [0, 17] {
        assert_eq!(why(bytes), Some(alloc::format!("rows of {bytes} bytes, expected 1 to 16 for a width of 4")));
    }
}
