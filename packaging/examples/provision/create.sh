# For bash: Flatcar's sysext-bakery, as csi-registrar.sysext/create.sh; then ./bakery.sh create csi-registrar VERSION.
# Replace URL by the directory with the system extensions; VERSIONS there has one version in each line.
URL=${URL:-https://URL}
RELOAD_SERVICES_ON_MERGE="true"

function list_available_versions() {
  curl --fail --silent --show-error --location "$URL/VERSIONS" | sort -Vr
}

function populate_sysext_root() {
  local sysextroot="$1" arch version="$3"
  arch="$(arch_transform "x86-64" "amd64" "$2")"
  curl --fail --silent --show-error --location --output image "$URL/csi-registrar_${version}_${arch}.raw"
  unsquashfs -quiet -no-progress -dest image.d image
  cp -a image.d/usr "$sysextroot/"
}
