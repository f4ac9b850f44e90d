//! Tests of the output formats: files can be read, replaced, continued and rewritten after a failure; the examples are
//! valid.
use std::fs;
use std::io::Read;

use kernels::threads::Threads;
use kernels_grids::tile::Tile;
use kernels_simulations::Mosaic;
use tempfile::TempDir;

use super::*;

/// A simulation with one output.
fn job(dimensions: &str, rule: &str, output: &str) -> Simulation {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("job.toml");
    let text =
        format!("name = \"a\"\nsteps = 100\n[grid]\nsize = {dimensions}\n[rule]\n{rule}\n[[output]]\n{output}\n");
    fs::write(&path, text).unwrap();
    Simulation::read(&path).unwrap_or_else(|error| panic!("{error}"))
}

const HEAT: &str = "name = \"heat\"\nrate = 0.1";

/// A frame of distinct values.
fn frame(size: [usize; 3], step: u64) -> Field {
    let cells = size.iter().product::<usize>();
    Field { size, values: (0..cells).map(|at| (at as f32 - cells as f32 / 2.0) * (step + 1) as f32).collect() }
}

fn writer(simulation: &Simulation, out: &TempDir, from: u64) -> Writer {
    Writer::new(simulation, &simulation.outputs()[0], out.path(), from).unwrap()
}

/// Names in a folder, sorted.
fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn images_have_y_up_and_the_right_colours() {
    let simulation = job("[32, 16]", HEAT, "kind = \"png\"\nevery = 10\nfolder = \"p\"\nrange = [0, 1]\nsize_max = 64");
    let out = tempfile::tempdir().unwrap();
    let mut values = vec![0.0; 32 * 16];
    (values[0], values[33], values[15 * 32]) = (1.0, f32::NAN, 0.5);
    writer(&simulation, &out, 0).write(20, &Field { size: [32, 16, 1], values }).unwrap();
    assert_eq!(names(&out.path().join("p")), ["temperature_0000000020.png"]);
    let file = fs::File::open(out.path().join("p/temperature_0000000020.png")).unwrap();
    let mut decoder = png::Decoder::new(std::io::BufReader::new(file));
    decoder.set_transformations(png::Transformations::EXPAND);
    let mut reader = decoder.read_info().unwrap();
    let mut pixels = vec![0; reader.output_buffer_size().unwrap()];
    let info = reader.next_frame(&mut pixels).unwrap();
    assert_eq!((info.width, info.height), (64, 32), "2 × 2 pixels per cell");
    let at = |x: usize, y: usize| &pixels[3 * (y * 64 + x)..][..3];
    assert_eq!(at(0, 31), [252, 255, 164], "hot at the lower left, where x and y are 0");
    assert_eq!(at(2, 29), [255, 0, 255], "NaN");
    assert_eq!(at(1, 1), at(0, 0));
    assert!(at(0, 0)[0] > 150 && at(0, 0)[0] < 220 && at(63, 0) == [0, 0, 4], "a middle value, and a cold cell");
}

#[test]
fn solid_cells_are_grey_and_do_not_affect_the_range() {
    let rule = "name = \"d2q9\"\ntau = 1\nsolid = \"x < 4\"";
    let simulation = job("[32, 16]", rule, "kind = \"png\"\nquantity = \"ux\"\nevery = 10");
    let spec = &simulation.outputs()[0];
    let painter = Painter::new(&simulation, spec.colours, None, simulation.output_view(spec), 32);
    let mut field = Field { size: [32, 16, 1], values: vec![0.5; 32 * 16] };
    (field.values[2], field.values[9]) = (-9.0, -0.25);
    assert_eq!(painter.range_of(&field), [-0.5, 0.5], "symmetric around 0");
    let picture = painter.paint(&field, None);
    assert_eq!(picture.palette[usize::from(picture.pixels[0])], [110, 110, 110]);
    assert_eq!(picture.pixels[5], 253);
}

#[test]
fn ranges_are_never_empty() {
    for values in [vec![], vec![f32::NAN], vec![0.0, 0.0], vec![3.0], vec![f32::MIN, f32::MAX], vec![1e-44, 2e-44]] {
        for colours in [kernels_simulations::Colours::Diverging, kernels_simulations::Colours::Fire] {
            let [low, high] = colours::range(colours, values.iter().copied());
            assert!(low < high && (high - low).is_finite(), "{values:?}: {low} {high}");
            assert!(values.iter().all(|value| colours::level(*value, [low, high]) != colours::SOLID));
        }
    }
}

#[test]
fn an_animation_is_complete_after_every_frame_and_continues_after_a_restart() {
    for range in ["", "range = [-100, 100]\nfps = 10"] {
        let simulation = job("[32, 16]", HEAT, &format!("kind = \"gif\"\nevery = 10\nfolder = \"f\"\n{range}"));
        let [whole, again] = [(); 2].map(|()| tempfile::tempdir().unwrap());
        let film = |out: &TempDir| fs::read(out.path().join("f/temperature.gif")).unwrap();
        let size = [32, 16, 1];
        let mut one = writer(&simulation, &whole, 0);
        let mut frames = Vec::new();
        for step in (0..=100).step_by(10) {
            one.write(step, &frame(size, step % 40)).unwrap();
            frames.push(shown(&film(&whole)));
        }
        let counts: Vec<usize> = frames.iter().map(Vec::len).collect();
        assert_eq!(counts, (1..=11).collect::<Vec<_>>());
        one.finish().unwrap();
        let film_now = film(&whole);
        let mut decoder = gif::DecodeOptions::new().read_info(&film_now[..]).unwrap();
        assert_eq!(decoder.read_next_frame().unwrap().unwrap().delay, if range.is_empty() { 4 } else { 10 });

        // Stopped in the middle of a frame, resumed from an earlier checkpoint, with some frames written twice.
        let mut two = writer(&simulation, &again, 0);
        (0..=60).step_by(10).for_each(|step| two.write(step, &frame(size, step % 40)).unwrap());
        let torn = film(&again);
        fs::write(again.path().join("f/temperature.gif"), &torn[..torn.len() - 50]).unwrap();
        let mut two = writer(&simulation, &again, 70);
        assert_eq!(shown(&film(&again)).len(), 6, "the torn frame is removed");
        two.write(60, &frame(size, 60 % 40)).unwrap();
        let mut two = writer(&simulation, &again, 40);
        assert_eq!(shown(&film(&again)).len(), 5, "later frames are removed");
        two.write(50, &frame(size, 7)).unwrap();
        (30..=100).step_by(10).for_each(|step| two.write(step, &frame(size, step % 40)).unwrap());
        assert!(film(&whole) == film(&again), "the same file");

        // Another run in the same folder.
        writer(&simulation, &again, 0).write(0, &frame(size, 0)).unwrap();
        assert_eq!(shown(&film(&again)).len(), 1);
        fs::write(again.path().join("f/temperature.gif"), b"GIF89a, or not").unwrap();
        writer(&simulation, &again, 50).write(50, &frame(size, 0)).unwrap();
        assert_eq!(shown(&film(&again)).len(), 1);
    }
}

/// The frames of a GIF.
fn shown(gif: &[u8]) -> Vec<Vec<u8>> {
    let mut decoder = gif::DecodeOptions::new().read_info(gif).unwrap();
    let mut frames = Vec::new();
    while let Some(frame) = decoder.read_next_frame().unwrap() {
        frames.push(frame.buffer.to_vec());
    }
    frames
}

#[test]
fn arrays_have_all_frames_and_chunks_of_equal_size() {
    let out = tempfile::tempdir().unwrap();
    let simulation = job("[520, 4]", HEAT, "kind = \"zarr\"\nevery = 50\nfolder = \"z\"");
    let mut array = writer(&simulation, &out, 0);
    array.write(0, &frame([520, 4, 1], 0)).unwrap();
    array.write(50, &frame([520, 4, 1], 7)).unwrap();
    array.write(50, &frame([520, 4, 1], 1)).unwrap();
    let read = |path: &str| fs::read(out.path().join("z").join(path)).unwrap();
    let about: serde_json::Value = serde_json::from_slice(&read("temperature/zarr.json")).unwrap();
    let attributes = &about["attributes"];
    assert_eq!(attributes["steps_between_frames"], 50, "{attributes}");
    assert!(attributes["long_name"] == "temperature" && attributes["units"].is_string(), "{attributes}");
    assert_eq!(attributes["_ARRAY_DIMENSIONS"], about["dimension_names"]);
    assert_eq!(about["shape"], serde_json::json!([3, 4, 520]));
    assert_eq!(about["chunk_grid"]["configuration"]["chunk_shape"], serde_json::json!([1, 4, 512]));
    let floats = |bytes: &[u8]| -> Vec<f32> {
        bytes.chunks_exact(4).map(|four| f32::from_le_bytes(four.try_into().unwrap())).collect()
    };
    let (left, right) = (floats(&read("temperature/c/1/0/0")), floats(&read("temperature/c/1/0/1")));
    let expected = frame([520, 4, 1], 1).values;
    assert_eq!((left.len(), left[512..1024] == expected[520..1032]), (4 * 512, true));
    assert!(right[..8] == expected[512..520] && right[8].is_nan() && right.len() == left.len());
    assert_eq!(read("time/c/0"), [0u64, 50, 100].map(u64::to_le_bytes).concat());
    // After resuming from a checkpoint between two frames, the later frame is written again.
    let _ = writer(&simulation, &out, 20);
    assert_eq!(names(&out.path().join("z/temperature/c")), ["0"]);

    let simulation = job("[64, 4]", "name = \"life\"", "kind = \"zarr\"\nevery = 50\nfolder = \"z\"");
    let mut cells = Field { size: [64, 4, 1], values: vec![0.0; 256] };
    cells.values[65] = 1.0;
    writer(&simulation, &out, 0).write(0, &cells).unwrap();
    let mut bytes = Vec::new();
    flate2::read::GzDecoder::new(&read("alive/c/0/0/0")[..]).read_to_end(&mut bytes).unwrap();
    assert_eq!((bytes.len(), bytes[65], bytes[64]), (256, 1, 0));
}

#[test]
fn images_for_paraview_name_their_steps() {
    let out = tempfile::tempdir().unwrap();
    let simulation = job("[8, 4, 3]", HEAT, "kind = \"vtk\"\nevery = 20\nfolder = \"v\"");
    let mut series = writer(&simulation, &out, 0);
    [0, 20, 40].into_iter().for_each(|step| series.write(step, &frame([8, 4, 3], step)).unwrap());
    series.finish().unwrap();
    let folder = out.path().join("v");
    let list = fs::read_to_string(folder.join("temperature.pvd")).unwrap();
    assert!(list.contains("timestep=\"40\" part=\"0\" file=\"temperature_0000000040.vti\""), "{list}");
    let file = fs::read(folder.join("temperature_0000000020.vti")).unwrap();
    let text = String::from_utf8_lossy(&file);
    assert!(text.contains("WholeExtent=\"0 8 0 4 0 3\"") && text.contains(">20</DataArray>"), "{text}");
    let start = file.windows(2).position(|pair| pair == b"\n_").unwrap() + 2;
    assert_eq!(file[start..start + 8], (8u64 * 4 * 3 * 4).to_le_bytes());
    assert_eq!(file[start + 8..start + 12], frame([8, 4, 3], 20).values[0].to_le_bytes());
    let _ = writer(&simulation, &out, 20);
    assert_eq!(names(&folder), ["temperature.pvd", "temperature_0000000000.vti", "temperature_0000000020.vti"]);
}

#[test]
fn a_write_that_fails_changes_nothing_and_can_be_repeated() {
    for (kind, file) in [
        ("png", "p/temperature_0000000010.png"),
        ("vtk", "p/temperature_0000000010.vti"),
        ("zarr", "p/temperature/c/1/0/0"),
        ("gif", "p/temperature.gif"),
    ] {
        let out = tempfile::tempdir().unwrap();
        let simulation = job("[32, 16]", HEAT, &format!("kind = \"{kind}\"\nevery = 10\nfolder = \"p\""));
        let mut writer = writer(&simulation, &out, 0);
        let place = out.path().join(file);
        // A folder is in the place of the file.
        fs::create_dir_all(place.join("in the way")).unwrap();
        let error = writer.write(10, &frame([32, 16, 1], 1)).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("cannot write") && text.contains(file) && !text.contains("the disk is full"), "{text}");
        assert!(names(place.parent().unwrap()).iter().all(|name| !name.contains("partial")));
        fs::remove_dir_all(&place).unwrap();
        writer.write(10, &frame([32, 16, 1], 1)).unwrap();
        assert!(place.is_file());

        let error = writer.write(15, &frame([32, 16, 1], 1)).unwrap_err().to_string();
        assert!(error.contains("a multiple of 10"), "{error}");
        let error = writer.write(10, &frame([32, 15, 1], 1)).unwrap_err().to_string();
        assert!(error.contains("[32, 16, 1]") && error.contains("[32, 15, 1]"), "{error}");
    }
}

#[test]
fn an_unusable_folder_is_reported_at_once() {
    let out = tempfile::tempdir().unwrap();
    fs::write(out.path().join("p"), b"a file").unwrap();
    let simulation = job("[32, 16]", HEAT, "kind = \"png\"\nevery = 10\nfolder = \"p\"");
    let error = Writer::new(&simulation, &simulation.outputs()[0], out.path(), 0).map(|_| ()).unwrap_err().to_string();
    assert!(error.contains("a file where a folder is expected") && error.contains("--out"), "{error}");
    let full = files::failed(out.path(), &std::io::Error::from(std::io::ErrorKind::StorageFull));
    assert!(full.to_string().contains("the disk is full; free some space; the run then continues"), "{full}");
}

#[test]
fn a_terminal_shows_two_pixels_per_character() {
    let simulation = job("[32, 16]", HEAT, "kind = \"png\"\nevery = 10\nrange = [0, 1]");
    let spec = &simulation.outputs()[0];
    let painter = Painter::new(&simulation, spec.colours, spec.range, simulation.output_view(spec), 32);
    let mut field = Field { size: [32, 16, 1], values: vec![0.0; 32 * 16] };
    field.values[15 * 32..].fill(1.0);
    for (columns, lines, across, down) in [(80, 24, 32, 8), (16, 24, 16, 4), (80, 2, 8, 2), (1, 1, 1, 1), (0, 0, 1, 1)]
    {
        let text = render(&painter, &field, columns, lines);
        let count = |line: &str| line.chars().filter(|c| *c == '▀').count();
        assert_eq!(text.lines().map(count).collect::<Vec<_>>(), vec![across; down], "{columns} × {lines}");
    }
    let text = render(&painter, &field, 32, 8);
    assert!(text.starts_with("\x1b[38;2;252;255;164m\x1b[48;2;0;0;4m▀▀"), "{text:?}");
}

#[test]
fn examples_are_valid() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples");
    let out = tempfile::tempdir().unwrap();
    let mut seen = 0;
    for name in names(&folder).into_iter().filter(|name| name.ends_with(".toml")) {
        let simulation = Simulation::read(&folder.join(&name)).unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(simulation.warnings(), [""; 0], "{name}");
        assert!(!simulation.outputs().is_empty(), "{name}: has outputs");
        let text = fs::read_to_string(folder.join(&name)).unwrap();
        assert!(
            text.starts_with("# ") && text.contains("one core"),
            "{name} begins with a comment that includes the time on one core"
        );
        let region = simulation.grid().region();
        let mut tile = Tile::new(simulation.grid(), simulation.rule(), region, 1).unwrap();
        simulation.load(&mut tile).unwrap();
        tile.advance(&mut Threads::new(1).unwrap(), 3).unwrap();
        assert_eq!(tile.first_not_finite().unwrap(), None, "{name}");
        for spec in simulation.outputs() {
            let shown = simulation.output_view(spec);
            let mut mosaic = Mosaic::new(&simulation, &spec.quantity, shown).unwrap();
            for need in simulation.source_quantities(&spec.quantity) {
                mosaic.add(need, shown.0, &simulation.sample(&tile, need, shown.0, shown.1).unwrap()).unwrap();
            }
            let mut writer = Writer::new(&simulation, spec, &out.path().join(&name), 0).unwrap();
            writer.write(spec.every, &mosaic.finish()).unwrap();
            writer.finish().unwrap();
        }
        seen += 1;
    }
    assert!(seen >= 9, "{seen} examples");
}
