# Put into the scripts of deb and rpm in place of the line "# @mounted@".

# warn_mounted warns if volumes of a driver that this daemon registers are mounted. Beside
# each mount the kubelet keeps a file with the driver's name. To go on is the admin's right.
warn_mounted() {
	[ -r /proc/self/mountinfo ] || return 0
	# The fifth field is the mount point; the last of a pattern's directories is the volume's own.
	while read -r _ _ _ _ where _; do
		case $where in
		*/plugins/kubernetes.io/csi/* | */pods/*/volumes/kubernetes.io~csi/*) ;;
		*) continue ;;
		esac
		data=${where%/*}/vol_data.json
		[ -r "$data" ] || continue
		driver=$(sed -n 's/.*"driverName" *: *"\([^"]*\)".*/\1/p' "$data")
		[ -n "$driver" ] && [ -e "/run/csi-registrar/registrations/$driver.json" ] || continue
		echo "csi-registrar: warning: a volume of $driver is mounted at $where." >&2
		mounted=yes
	done </proc/self/mountinfo
	[ -z "${mounted:-}" ] || cat >&2 <<-'EOF'
		csi-registrar: warning: without csi-registrar these drivers are not registered, and the
		kubelet cannot unmount their volumes: pods that use them will not end until the drivers
		are registered again, by this package or by a node-driver-registrar.
	EOF
}
