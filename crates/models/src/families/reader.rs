//! Reading of media, in the steps that all families share. What a family makes of a picture, a clip or a sound is its [`Reader`].

use std::path::Path;

use omnigrpo_data::{MediumInfo, MediumRef};
use omnigrpo_media::audio::LogMel;
use omnigrpo_media::{Filter, FrameSize, Rgb8Image, Turn, VideoFrames, load_image};
use omnigrpo_text::{Form, MediumKind};

use super::frames::{FramePlan, file};
use super::{MediaSettings, MediumInput, MediumPlan, MediumShape, sound};
use crate::config_json::ConfigJson;
use crate::error::{ModelError, Result};

/// A medium and the settings for reading it.
#[derive(Clone, Copy)]
pub(super) struct Request<'m> {
    pub medium: &'m MediumRef,
    pub settings: &'m MediaSettings,
}

/// Values of a decoded medium with their shape.
pub(super) type Values = (MediumShape, Vec<f32>);

/// The media of one checkpoint.
pub(super) trait Reader {
    /// Returns the supported kinds, and the same in words.
    fn supported(&self) -> (&'static [MediumKind], &'static str) {
        (&[MediumKind::Image, MediumKind::Video], "this model supports only images and videos")
    }

    /// Returns the rule of sounds.
    fn sound(&self) -> Result<&LogMel> {
        Err(ModelError::shape("this model has no rule for sounds"))
    }

    /// Chooses the frames of a clip.
    fn frames(&self, of: Request) -> Result<FramePlan> {
        Ok(FramePlan::new(of.medium, of.settings))
    }

    /// Returns the size at which the frames of a clip are decoded.
    fn frame_size(&self, of: Request, plan: &FramePlan) -> Result<FrameSize>;

    /// Returns the shape of a picture, or of a clip with this number of frames, from its header.
    fn shape(&self, of: Request, header: &MediumInfo, frames: Option<usize>) -> Result<MediumShape>;

    /// Returns the number of features of a medium of this shape.
    fn tokens(&self, shape: &MediumShape) -> Result<usize>;

    /// Converts a decoded picture to values.
    fn picture(&self, of: Request, picture: Rgb8Image) -> Result<Values>;

    /// Converts a decoded clip to values.
    fn clip(&self, of: Request, video: &VideoFrames) -> Result<Values>;

    /// Returns the time from one temporal patch of a clip with this frame rate to the next, in seconds; 0 without temporal patches.
    fn seconds_per_grid(&self, _sampled_fps: f64) -> f64 {
        0.0
    }
}

/// Reads the media of one checkpoint.
pub trait ReadMedia {
    /// Returns the supported kinds.
    fn kinds(&self) -> &'static [MediumKind];

    /// Plans a medium from its header.
    ///
    /// # Errors
    /// Returns an error if no choice satisfies the options, or the family does not support the kind or source.
    fn plan(&self, medium: &MediumRef, header: &MediumInfo, settings: &MediaSettings) -> Result<MediumPlan>;

    /// Decodes a medium.
    ///
    /// # Errors
    /// Returns an error if the medium is unreadable or no choice satisfies the options.
    fn prepare(&self, medium: &MediumRef, settings: &MediaSettings) -> Result<MediumInput>;
}

impl<R: Reader> ReadMedia for R {
    fn kinds(&self) -> &'static [MediumKind] {
        self.supported().0
    }

    fn plan(&self, medium: &MediumRef, header: &MediumInfo, settings: &MediaSettings) -> Result<MediumPlan> {
        let (of, mut frame_times_secs, mut seconds_per_grid) =
            (Request { medium, settings }, Vec::new(), 0.0);
        let header = &given(header, settings);
        let shape = match form(self, medium.kind)? {
            Form::Picture => self.shape(of, header, None)?,
            Form::Clip => {
                let (times_secs, fps) = self.frames(of)?.times_secs(header)?;
                (frame_times_secs, seconds_per_grid) = (times_secs, self.seconds_per_grid(fps));
                self.shape(of, header, Some(frame_times_secs.len()))?
            }
            Form::Sound => sound::plan(medium, header, self.sound()?, settings)?,
        };
        let (tokens, of_clip) = (self.tokens(&shape)?, medium.options.of_clip);
        Ok(MediumPlan { kind: medium.kind, shape, tokens, frame_times_secs, seconds_per_grid, of_clip })
    }

    fn prepare(&self, medium: &MediumRef, settings: &MediaSettings) -> Result<MediumInput> {
        let (of, kind) = (Request { medium, settings }, medium.kind);
        let ((shape, data), seconds_per_grid, frame_times_secs) = match form(self, kind)? {
            Form::Picture => {
                let picture = load_image(file(medium)?, settings.orientation, &settings.limits)?;
                (self.picture(of, picture)?, 0.0, Vec::new())
            }
            Form::Clip => {
                let plan = self.frames(of)?;
                let size = self.frame_size(of, &plan)?;
                let video = plan.decode(settings, size)?;
                (self.clip(of, &video)?, self.seconds_per_grid(video.sampled_fps), video.timestamps_s)
            }
            Form::Sound => return sound::prepare(medium, self.sound()?, settings),
        };
        let of_clip = medium.options.of_clip;
        Ok(MediumInput { kind, shape, data, seconds_per_grid, frame_times_secs, of_clip })
    }
}

fn form(reader: &impl Reader, kind: MediumKind) -> Result<Form> {
    let (kinds, what) = reader.supported();
    if kinds.contains(&kind) { Ok(kind.form()) } else { Err(ModelError::MediumKind { kind, what }) }
}

/// Returns a header with the size of the pixels in the form in which they are given.
fn given(header: &MediumInfo, settings: &MediaSettings) -> MediumInfo {
    let turn = Turn::from_exif(header.turn.into()).unwrap_or_default().given(settings.orientation);
    let size = header.width_px.zip(header.height_px).map(|(width, height)| turn.size([width, height]));
    MediumInfo {
        width_px: size.map(|[width, _]| width),
        height_px: size.map(|[_, height]| height),
        ..header.clone()
    }
}

/// Returns width and height of a picture or frame from its header, in px.
pub(super) fn size_px(of: Request, header: &MediumInfo) -> Result<[u32; 2]> {
    let no_size = || ModelError::Medium { kind: of.medium.kind, what: "its header gives no size" };
    header.width_px.zip(header.height_px).map(|(width, height)| [width, height]).ok_or_else(no_size)
}

/// Reads the image processor from `processor_config.json` or else `preprocessor_config.json`.
pub(super) fn image_processor(dir: &Path) -> Result<ConfigJson> {
    let nested = dir.join("processor_config.json");
    let nested = if nested.is_file() { ConfigJson::read(&nested)?.section("image_processor")? } else { None };
    nested.map_or_else(|| ConfigJson::read(&dir.join("preprocessor_config.json")), Ok)
}

/// Returns means and standard deviations of the channels from an image processor that resizes with this filter, scales bytes to
/// 0–1 and normalises.
pub(super) fn normalisation(
    json: &ConfigJson,
    filter: Filter,
    [mean, std]: [[f64; 3]; 2],
) -> Result<[[f64; 3]; 2]> {
    json.only("resample", filter.code())?;
    json.only("rescale_factor", 1.0 / 255.0)?;
    for key in ["do_rescale", "do_normalize"] {
        json.only(key, true)?;
    }
    Ok([json.triple("image_mean", mean)?, json.triple("image_std", std)?])
}
