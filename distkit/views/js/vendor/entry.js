// The parts of d3 that the views use; `tools/vendor` bundles it into d3.js.
export { pointer, select } from "d3-selection";
export { zoom, zoomIdentity, zoomTransform } from "d3-zoom";
export {
  scaleDiverging, scaleLinear, scaleOrdinal, scaleSequential, scaleSqrt, scaleSymlog,
} from "d3-scale";
export { interpolateCividis, interpolatePuOr, interpolateViridis } from "d3-scale-chromatic";
export { interpolateNumber, interpolateRgb } from "d3-interpolate";
export { bin, bisector, extent, max, min, ticks } from "d3-array";
export { format } from "d3-format";
export { arc, area, line } from "d3-shape";
