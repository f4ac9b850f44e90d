//! Writes all cells of a frame as a VTK image (`.vti`) for ParaView, and a list of all frames with their steps.
use std::fmt::Write;
use std::path::PathBuf;

use kernels_simulations::Field;

use super::OutputError;
use super::files::{numbered, remove_after, replace, steps};

pub(super) struct Series {
    folder: PathBuf,
    quantity: String,
}

impl Series {
    pub(super) fn open(folder: PathBuf, quantity: &str, from: u64) -> Result<Self, OutputError> {
        remove_after(&folder, quantity, ENDING, from)?;
        Ok(Self { folder, quantity: quantity.into() })
    }

    /// Writes cell data (not point data), as raw bytes appended to the XML.
    pub(super) fn write(&self, step: u64, field: &Field) -> Result<(), OutputError> {
        let ([nx, ny, nz], name) = (field.size, &self.quantity);
        let extent = format!("0 {nx} 0 {ny} 0 {nz}");
        let head = format!(
            "<?xml version=\"1.0\"?>\n\
             <VTKFile type=\"ImageData\" version=\"1.0\" byte_order=\"LittleEndian\" header_type=\"UInt64\">\n\
             <ImageData WholeExtent=\"{extent}\" Origin=\"0 0 0\" Spacing=\"1 1 1\">\n\
             <FieldData>\n\
             <DataArray type=\"Float64\" Name=\"TimeValue\" NumberOfTuples=\"1\" format=\"ascii\">{step}</DataArray>\n\
             </FieldData>\n\
             <Piece Extent=\"{extent}\">\n\
             <PointData/>\n\
             <CellData Scalars=\"{name}\">\n\
             <DataArray type=\"Float32\" Name=\"{name}\" format=\"appended\" offset=\"0\"/>\n\
             </CellData>\n\
             </Piece>\n\
             </ImageData>\n\
             <AppendedData encoding=\"raw\">\n_"
        );
        let cells: Vec<u8> = field.values.iter().flat_map(|value| value.to_le_bytes()).collect();
        let len = (cells.len() as u64).to_le_bytes();
        let path = numbered(&self.folder, name, step, ENDING);
        replace(&path, &[head.as_bytes(), &len, &cells, b"\n</AppendedData>\n</VTKFile>\n"])
    }

    /// Writes the list of all frames.
    pub(super) fn finish(&self) -> Result<(), OutputError> {
        let mut list = String::from(
            "<?xml version=\"1.0\"?>\n<VTKFile type=\"Collection\" version=\"1.0\" byte_order=\"LittleEndian\">\n<Collection>\n",
        );
        for step in steps(&self.folder, &self.quantity, ENDING)? {
            let path = numbered(&self.folder, &self.quantity, step, ENDING);
            let file = path.file_name().unwrap_or_default().to_string_lossy();
            let _ = writeln!(list, "<DataSet timestep=\"{step}\" part=\"0\" file=\"{file}\"/>");
        }
        list.push_str("</Collection>\n</VTKFile>\n");
        replace(&self.folder.join(format!("{}{LIST_ENDING}", self.quantity)), &[list.as_bytes()])
    }
}

/// Suffix of a frame's file.
pub(super) const ENDING: &str = ".vti";
/// Suffix of the list of all frames.
pub(super) const LIST_ENDING: &str = ".pvd";
