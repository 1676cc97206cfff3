#!/bin/sh
# make-certificates.sh DIRECTORY [NAMESPACE] [NAME]: an authority of one's own, and certificates for the secrets of the
# component tls, for trying it out. NAME is what clients outside the cluster call the orchestrator. Valid for 90 days.
set -eu
directory=$1 namespace=${2:-foredraft} public=${3:-localhost}
new_key="-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes"
umask 077
mkdir -p "$directory"
cd "$directory"
test -e ca.key || openssl req -x509 $new_key -days 90 -subj "/CN=foredraft authority" \
    -keyout ca.key -out ca.crt

certificate() { # NAME DNS-NAME... writes NAME/tls.key, NAME/tls.crt and NAME/ca.crt
    name=$1
    shift
    names=$(printf ',DNS:%s' "$@")
    mkdir -p "$name"
    openssl req $new_key -subj "/CN=$1" -keyout "$name/tls.key" -out "$name/request"
    printf 'subjectAltName=%s\nextendedKeyUsage=serverAuth,clientAuth\n' "${names#,}" > "$name/extensions"
    openssl x509 -req -in "$name/request" -CA ca.crt -CAkey ca.key -CAcreateserial -days 90 \
        -extfile "$name/extensions" -out "$name/tls.crt"
    cp ca.crt "$name/ca.crt"
    rm "$name/request" "$name/extensions"
}

for service in target draft orchestrator; do
    set -- "$service" "$service.$namespace.svc" "$service.$namespace.svc.cluster.local"
    test "$service" = orchestrator && set -- "$@" "$public"
    certificate "$service" "$@"
done
certificate orchestrator-client orchestrator-client
